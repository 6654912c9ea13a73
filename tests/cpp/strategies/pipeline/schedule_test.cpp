#include <trireme/strategies/pipeline/schedule.h>

#include <trireme/strategies/pipeline/schedule_lowering.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <catch_torch.h>
#include <cstddef>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strategies/pipeline/tables.h"

namespace trireme::schedule_test {

using Catch::Contains;
using test::make_form;

TEST_CASE("a table of a pipeline goes to text and comes back") {
  for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"})
    for (const int64_t micro_batches : {2, 5, 8}) {
      CAPTURE(name, micro_batches);
      const PipelineSchedule schedule = make_form(name, 2, micro_batches);
      CHECK(schedule_from_csv(to_csv(schedule, TableForm::kComputeOnly)) == schedule);
      const std::string lowered = to_csv(schedule, TableForm::kComputeComms);
      CHECK(schedule_from_csv(lowered) == lower_schedule(schedule));
      CHECK(to_csv(lower_schedule(schedule), TableForm::kComputeComms) == lowered);
      const std::string back = to_csv(lower_schedule(schedule), TableForm::kComputeOnly);
      CHECK(schedule_from_csv(back) == schedule);
    }
  // One rank sends nothing, and yet its table can be lowered.
  const PipelineSchedule alone = make_form("gpipe", 1, 2);
  CHECK(to_csv(lower_schedule(lower_schedule(alone)), TableForm::kComputeComms) ==
        "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n");
  const std::string other = "0UNSHARD,,0F0,0RESHARD,0UNSHARD,0B0\n";
  CHECK(to_csv(schedule_from_csv(other), TableForm::kComputeComms) == other);
}

TEST_CASE("bubbles, line ends and quotes of other writers are read") {
  const PipelineSchedule schedule = schedule_from_csv("0F0,,0B0\r\n,1F0, 1B0 ,\"\"");
  CHECK(schedule.ranks == 2);
  CHECK(schedule.stages == 2);
  CHECK(schedule.micro_batches == 1);
  CHECK(schedule.stage_rank == std::vector<int64_t>{0, 1});
  CHECK(to_csv(schedule, TableForm::kComputeOnly) == "0F0,,0B0\n,1F0,1B0,\n");
}

TEST_CASE("a typo is told with its row and column") {
  CHECK_THROWS_WITH(schedule_from_csv("0F0,0B0\n1F0,1C0\n"), Contains("row 2, column 2"));
  CHECK_THROWS_WITH(schedule_from_csv("0F0,0B0\n2F0,2B0\n"),
                    Contains("got no action for stage 1 of 3"));
  CHECK_THROWS_WITH(schedule_from_csv("0F0,0B0\n999999999F0\n"),
                    Contains("got 1000000000 stages and 1 micro-batches in a table of 3 cells"));
  CHECK_THROWS_AS(schedule_from_csv(""), c10::ValueError);
  CHECK_THROWS_WITH(table_form("compute"), Contains("expected \"compute_only\""));
}

namespace {

// Reads any text: a table that is written as it was read, or ValueError. Returns whether it is one.
bool is_read(const std::string& text) {
  PipelineSchedule read;
  try {
    read = schedule_from_csv(text);
  } catch (const c10::ValueError&) {
    return false;
  }
  CAPTURE(text);
  CHECK(schedule_from_csv(to_csv(read, TableForm::kAsItIs)) == read);
  CHECK_NOTHROW(schedule_from_csv(to_csv(read, TableForm::kComputeOnly)));
  CHECK(to_string(read).size() > 0);
  return true;
}

// Changes some characters, or lets two cells or lines change places.
std::string mutated(std::string text, std::mt19937& random) {
  static constexpr std::string_view kLetters = "0123456789FBIWRSENDCVUH_;(),,\n\r\" \t-\0\xff";
  const auto any_place = [&] { return random() % (text.size() + 1); };
  for (auto changes = 1 + random() % 3; changes > 0; --changes) {
    const size_t place = any_place();
    const size_t other = any_place();
    const char letter = kLetters[random() % kLetters.size()];
    switch (random() % 4) {
      case 0:
        text.insert(place, 1, letter);
        break;
      case 1:
        text.erase(place, 1 + random() % 3);
        break;
      case 2:
        text.append(text.substr(place, random() % 12));
        break;
      default:
        if (place < text.size() && other < text.size()) std::swap(text[place], text[other]);
    }
  }
  return text;
}

}  // namespace

TEST_CASE("any text is a table or refused") {
  std::mt19937 random(11);
  int read = 0;
  for (const char* name : {"1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v"})
    for (const TableForm form : {TableForm::kComputeOnly, TableForm::kComputeComms}) {
      const std::string table = to_csv(make_form(name, 2, 2), form);
      for (int round = 0; round < 1500; ++round) read += is_read(mutated(table, random)) ? 1 : 0;
    }
  CHECK(read > 100);
  for (int round = 0; round < 3000; ++round) {
    std::string text(random() % 64, '\0');
    for (char& letter : text) letter = static_cast<char>(random() % 256);
    CHECK_FALSE(is_read(text));
  }
}

TEST_CASE("a lowered table has what torch adds") {
  CHECK(to_csv(make_form("1f1b", 2, 2), TableForm::kComputeComms) ==
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,"
        "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,"
        "1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0,1WAIT_SEND_B1\n");
}

TEST_CASE("what is added to a table costs no time") {
  for (const char* name : {"1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"}) {
    CAPTURE(name);
    const PipelineSchedule schedule = make_form(name, 3, 8);
    CHECK(makespan(lower_schedule(schedule)) == makespan(schedule));
    CHECK(peak_activations(lower_schedule(schedule), 0) == peak_activations(schedule, 0));
  }
}

TEST_CASE("an overlap begins when all of it can") {
  CHECK_NOTHROW(lower_schedule(schedule_from_csv("0F0,0B0\n(1F0;1B0)OVERLAP_F_B\n")));
  CHECK_THROWS_WITH(schedule_from_csv("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n"),
                    Contains("0F0 (rank 0, column 1) waits for 1SEND_B0") &&
                        Contains("1F0 (rank 1, column 1) waits for 0SEND_F0"));
  CHECK_THROWS_WITH(lower_schedule(schedule_from_csv("(0F0;1F0)OVERLAP_F_B,1B0,0B0\n")),
                    Contains("which needs what it makes itself"));
}

}  // namespace trireme::schedule_test
