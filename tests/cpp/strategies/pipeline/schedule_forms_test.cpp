#include <trireme/strategies/pipeline/schedule_forms.h>

#include <trireme/strategies/pipeline/schedule_check.h>

#include <algorithm>
#include <catch_torch.h>
#include <random>
#include <string>
#include <vector>

#include "strategies/pipeline/tables.h"

namespace trireme::schedule_forms_test {

using Catch::Contains;
using test::make_form;
using test::row_of;

TEST_CASE("forms of one stage per rank") {
  const PipelineSchedule gpipe = make_form("gpipe", 2, 3);
  CHECK(row_of(gpipe, 0) == "0F0 0F1 0F2 0B0 0B1 0B2");
  CHECK(row_of(gpipe, 1) == "1F0 1F1 1F2 1B0 1B1 1B2");
  const PipelineSchedule one_f_one_b = make_form("1f1b", 2, 3);
  CHECK(row_of(one_f_one_b, 0) == "0F0 0F1 0B0 0F2 0B1 0B2");
  CHECK(row_of(one_f_one_b, 1) == "1F0 1B0 1F1 1B1 1F2 1B2");
  const PipelineSchedule zb = make_form("zb-h1", 2, 3);
  CHECK(row_of(zb, 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  CHECK(row_of(zb, 1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
}

TEST_CASE("forms of two stages per rank") {
  const PipelineSchedule looped = make_form("looped-bfs", 2, 2);
  CHECK(row_of(looped, 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  CHECK(looped.stage_rank == std::vector<int64_t>{0, 1, 0, 1});
  const PipelineSchedule interleaved = make_form("interleaved-1f1b", 2, 3);
  CHECK(row_of(interleaved, 0) == "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2");
  CHECK(row_of(interleaved, 1) == "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2");
  const PipelineSchedule v = make_form("zb-v", 2, 3);
  CHECK(v.stage_rank == std::vector<int64_t>{0, 1, 1, 0});
  CHECK(row_of(v, 0) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2");
  CHECK(row_of(v, 1) == "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2");
  const PipelineSchedule dual = make_form("dualpipe-v", 2, 4);
  CHECK(row_of(dual, 0) ==
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
        "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3");
  CHECK(row_of(dual, 1) ==
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
        "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3");
}

TEST_CASE("numbers that torch refuses work") {
  const PipelineSchedule few = make_form("1f1b", 4, 2);
  CHECK(row_of(few, 0) == "0F0 0F1 0B0 0B1");
  CHECK(row_of(few, 2) == "2F0 2F1 2B0 2B1");
  // Rounds of three micro-batches and of two.
  CHECK(row_of(make_form("interleaved-1f1b", 2, 5), 1) ==
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4");
  // An overlap of which one half is one micro-batch too many is the other half.
  CHECK(row_of(make_form("dualpipe-v", 2, 3), 0) ==
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 (3F2;0B0)OVERLAP_F_B 3B2 0B1 0I2 0W2");
}

// Construction checks every table.
TEST_CASE("every form works with all numbers") {
  for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"})
    for (int64_t ranks = 1; ranks <= 9; ++ranks)
      for (int64_t micro_batches = 1; micro_batches <= 33; ++micro_batches) {
        CAPTURE(name, ranks, micro_batches);
        CHECK_NOTHROW(make_form(name, ranks, micro_batches));
      }
  for (const char* name : {"interleaved-1f1b", "looped-bfs", "zb-h1", "zb-auto"})
    for (int64_t ranks = 1; ranks <= 5; ++ranks)
      for (int64_t micro_batches = 1; micro_batches <= 17; ++micro_batches)
        for (const int64_t stages : {1, 3, 4}) {
          CAPTURE(name, ranks, micro_batches, stages);
          CHECK_NOTHROW(make_form(name, ranks, micro_batches, stages));
        }
}

TEST_CASE("the backwards of a stage come in the order of micro-batches") {
  for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"}) {
    CAPTURE(name);
    for (const PipelineSchedule& schedule : {make_form(name, 3, 7), make_form(name, 4, 3)}) {
      std::vector<int32_t> next(static_cast<size_t>(schedule.stages), 0);
      for (const RankActions& row : schedule.rows)
        for (const PipelineAction& action : row)
          for_each_part(action, [&](const PipelineAction& part) {
            const bool ends =
                part.kind == ActionKind::kBackward || part.kind == ActionKind::kBackwardWeight;
            if (ends) CHECK(part.micro_batch == next[static_cast<size_t>(part.stage)]++);
          });
    }
  }
}

TEST_CASE("zb-auto follows costs and keeps to its limit") {
  for (const int64_t stages : {1, 2, 3})
    for (const int64_t limit : {3, 4, 6}) {
      CAPTURE(stages, limit);
      PipelineScheduleRequest request{"zb-auto", 3, 9, stages, {}, limit};
      request.costs = ScheduleCosts{{{1, 2, 0.5}}, 0.25};
      const PipelineSchedule schedule = pipeline_schedule(request);
      for (int64_t rank = 0; rank < 3; ++rank) CHECK(peak_activations(schedule, rank) <= limit);
      const double serial = 3.5 * 9 * static_cast<double>(stages);
      CHECK(makespan(schedule, *request.costs) >= serial);
    }
  PipelineScheduleRequest request{"zb-auto", 3, 9, 2, {}, 1};
  CHECK_THROWS_WITH(pipeline_schedule(request),
                    Contains("got a limit of 1 live activations, expected at least 2"));
}

TEST_CASE("zb-auto is not slower than other forms that keep to its limit") {
  std::mt19937 random(3);
  const auto up_to = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % most); };
  int compared = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t ranks = up_to(6);
    const int64_t stages = up_to(3);
    PipelineScheduleRequest request{"zb-auto", ranks, up_to(16), stages};
    const auto cost = [&] { return 0.25 * static_cast<double>(up_to(8)); };
    request.costs = ScheduleCosts{{{cost(), cost(), cost()}}, cost() - 0.25};
    if (round % 3 > 0) request.max_activations = stages * (ranks + round % 3);
    const PipelineSchedule schedule = pipeline_schedule(request);
    const double length = makespan(schedule, *request.costs);
    for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1"}) {
      if (stages > 1 && (name == std::string("gpipe") || name == std::string("1f1b"))) continue;
      const PipelineSchedule other = make_form(name, ranks, request.micro_batches, stages);
      int64_t live = 0;
      for (const RankActions& row : other.rows) live = std::max(live, most_live(row));
      if (request.max_activations && live > *request.max_activations) continue;
      CAPTURE(name, ranks, stages, request.micro_batches, live);
      CHECK(length <= makespan(other, *request.costs) * (1 + 1e-12));
      ++compared;
    }
  }
  CHECK(compared > 500);
}

TEST_CASE("what no form can have is refused") {
  CHECK_THROWS_WITH(make_form("zb-h2", 2, 4),
                    Contains("got the schedule 'zb-h2', expected one of gpipe, 1f1b, "
                             "interleaved-1f1b, looped-bfs, zb-h1, zb-v, dualpipe-v, zb-auto"));
  CHECK_THROWS_WITH(make_form("gpipe", 0, 4), Contains("got 0 ranks"));
  CHECK_THROWS_WITH(make_form("gpipe", 2, 0), Contains("got 0 micro-batches"));
  CHECK_THROWS_WITH(make_form("gpipe", 2, 4, 2), Contains("got 2 stages per rank for 'gpipe'"));
  CHECK_THROWS_WITH(make_form("gpipe", 1 << 20, 1 << 20), Contains("expected at most"));
  PipelineScheduleRequest request{"1f1b", 2, 4, {}, ScheduleCosts(), {}};
  CHECK_THROWS_WITH(pipeline_schedule(request), Contains("whose order depends on neither"));
  request = {"zb-auto", 2, 4, {}, ScheduleCosts{{{1, -1, 1}}, 0}, {}};
  CHECK_THROWS_WITH(pipeline_schedule(request), Contains("got a cost that is below 0"));
  request.costs = ScheduleCosts{{{}, {}, {}}, 0};
  CHECK_THROWS_WITH(pipeline_schedule(request),
                    Contains("got costs for 3 stages, expected 1 or 2"));
}

}  // namespace trireme::schedule_forms_test
