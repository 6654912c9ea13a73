#include <trireme/strategies/pipeline/schedule_check.h>

#include <trireme/strategies/pipeline/schedule_lowering.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <algorithm>
#include <catch_torch.h>
#include <string>

#include "strategies/pipeline/tables.h"

namespace trireme::schedule_check_test {

using Catch::Contains;
using test::make_form;

namespace {

// Writes what check_schedule() returns, "0>1: 3" for an edge.
std::string slots_text(const PipelineSchedule& schedule) {
  std::string text;
  for (const EdgeSlots& need : check_schedule(schedule)) {
    text += (text.empty() ? "" : ", ") + std::to_string(need.edge.from) + ">" +
            std::to_string(need.edge.to) + ": " + std::to_string(need.slots);
  }
  return text;
}

}  // namespace

TEST_CASE("a table that is not whole is refused") {
  const auto refused = [](const char* csv, const char* why) {
    CAPTURE(csv);
    CHECK_THROWS_WITH(schedule_from_csv(csv), Contains(why));
  };
  refused("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", "there is no 0B1");
  refused("0F0,0I0\n1F0,1B0\n", "there is no 0W0");
  refused("0F0,0W0\n1F0,1B0\n", "there is no 0I0");
  refused("0B0\n1F0,1B0\n", "there is no 0F0");
  refused("0B0,0F0\n1F0,1B0\n", "0B0 (rank 0, column 1) comes before 0F0 (rank 0, column 2)");
  refused("0F0,0W0,0I0\n1F0,1B0\n", "0W0 (rank 0, column 2) comes before 0I0");
  refused("0F0,0I0,0W0,0B0\n1F0,1B0\n", "there are both 0B0 and 0I0");
  refused("0F0,0F0,0B0\n1F0,1B0\n", "got 0F0 in row 1, column 2, which is already there");
  refused("0F0,0B0\n1F0,1B0,0F0\n", "got 0F0 in row 2, column 3, but rank 0 holds stage 0");
  refused("0F0,0B0\n\n", "got no action for rank 1");
  refused("0F0,0B0,0R0\n1F0,1B0\n", "0R0 has no backward behind it");
  CHECK_NOTHROW(schedule_from_csv("0F0,0R0,0B0\n1F0,1B0\n"));
  // An evaluation has forwards only.
  CHECK_NOTHROW(schedule_from_csv("0F0,0F1\n1F0,1F1\n"));
}

TEST_CASE("a lowered table that is not whole is refused") {
  const std::string whole = to_csv(make_form("1f1b", 2, 2), TableForm::kComputeComms);
  CHECK_NOTHROW(schedule_from_csv(whole));
  const auto refused = [&](const std::string& part, const std::string& other, const char* why) {
    std::string table = whole;
    table.replace(table.find(part), part.size(), other);
    CAPTURE(table);
    CHECK_THROWS_WITH(schedule_from_csv(table), Contains(why));
  };
  refused("0SEND_F1,", "", "there is no 0SEND_F1");
  refused("1RECV_F1,", "", "there is no 1RECV_F1");
  refused("0RECV_B1,", "", "there is no 0RECV_B1");
  refused("1SEND_B0,", "", "there is no 1SEND_B0");
  refused("0SEND_F0", "0SEND_B0", "got 0SEND_B0 (rank 0, column 3), but no other rank");
  refused("1RECV_F0,1F0", "1F0,1RECV_F0", "1F0 (rank 1, column 2) waits for 1RECV_F0");
  refused("0B1,0WAIT_SEND_F1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1", "backwards of its stage follow");
  refused("0REDUCE_GRAD,", "", "no REDUCE_GRAD comes before it");
  refused(",0WAIT_REDUCE_GRAD", "", "got no 0WAIT_REDUCE_GRAD");
  refused("0F1", "0RESHARD,0F1", "the parameters of its stage have gone");
  refused("0F1", "0UNSHARD,0F1", "its parameters are there");
  refused("0UNSHARD,", "", "no UNSHARD comes before it");
}

TEST_CASE("ranks that wait for each other in a circle are named") {
  CHECK_THROWS_WITH(
      schedule_from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
      Contains("got a schedule that never ends: 0B0 (rank 0, column 2) waits for 1SEND_B0 (rank 1, "
               "column 3); 1F1 (rank 1, column 2) waits for 0SEND_F1 (rank 0, column 3)"));
  // Rank 0 stands, too, but is in no circle: it waits for ranks 1 and 2.
  const std::string far = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n";
  CHECK_THROWS_WITH(schedule_from_csv(far),
                    Contains("1B0 (rank 1, column 2) waits for 2SEND_B0") &&
                        Contains("2F1 (rank 2, column 2) waits for 1SEND_F1") && !Contains("0B0"));
}

TEST_CASE("the least slots are those with which nothing waits") {
  CHECK(slots_text(make_form("gpipe", 2, 3)) == "0>1: 3, 1>0: 1");
  CHECK(slots_text(make_form("1f1b", 2, 3)) == "0>1: 2, 1>0: 1");
  CHECK(slots_text(lower_schedule(make_form("1f1b", 2, 3))) == "0>1: 2, 1>0: 1");
  CHECK(check_schedule(make_form("gpipe", 1, 3)).empty());
  for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"}) {
    CAPTURE(name);
    const PipelineSchedule schedule = make_form(name, 4, 9);
    int64_t most = 0;
    for (const EdgeSlots& need : check_schedule(schedule)) most = std::max(most, need.slots);
    CHECK_NOTHROW(check_schedule(schedule, most));
  }
}

TEST_CASE("slots that nobody frees are a circle") {
  const PipelineSchedule gpipe = make_form("gpipe", 2, 3);
  CHECK_THROWS_WITH(check_schedule(gpipe, 1),
                    Contains("with 1 slots for each edge: 0SEND_F1 (rank 0, column 2) waits for "
                             "1B0 (rank 1, column 4); 1F1 (rank 1, column 2) waits for 0SEND_F1"));
  CHECK_NOTHROW(check_schedule(make_form("1f1b", 2, 3), 1));
  CHECK_THROWS_AS(check_schedule(gpipe, -1), c10::ValueError);
}

TEST_CASE("64 ranks and 512 micro-batches are checked") {
  const PipelineSchedule schedule = make_form("zb-h1", 64, 512);
  CHECK(bubble(schedule) == Approx(63.0 / (3 * 512 + 63)));
  CHECK(lower_schedule(schedule).rows[0].size() > schedule.rows[0].size());
}

}  // namespace trireme::schedule_check_test
