#include <trireme/strategies/pipeline/schedule_costs.h>

#include <algorithm>
#include <catch_torch.h>
#include <string>

#include "strategies/pipeline/tables.h"

namespace trireme::schedule_costs_test {

using Catch::Contains;
using test::make_form;

namespace {

void check_bubble(const PipelineSchedule& schedule, double idle, double busy) {
  CHECK(bubble(schedule) == Approx(idle / (busy + idle)).margin(1e-12));
}

}  // namespace

TEST_CASE("bubbles are those of the papers") {
  for (int64_t ranks = 1; ranks <= 5; ++ranks)
    for (int64_t micro_batches = 1; micro_batches <= 12; ++micro_batches) {
      CAPTURE(ranks, micro_batches);
      const auto p = static_cast<double>(ranks);
      const auto m = static_cast<double>(micro_batches);
      check_bubble(make_form("gpipe", ranks, micro_batches), p - 1, m);
      check_bubble(make_form("1f1b", ranks, micro_batches), p - 1, m);
      if (micro_batches >= 2 * ranks) {
        check_bubble(make_form("zb-h1", ranks, micro_batches), p - 1, 3 * m);
      }
      if (micro_batches % ranks == 0) {
        for (const int64_t stages : {2, 3}) {
          check_bubble(make_form("interleaved-1f1b", ranks, micro_batches, stages), p - 1,
                       static_cast<double>(stages) * m);
        }
      }
    }
}

TEST_CASE("live activations are those of the papers") {
  for (int64_t ranks = 1; ranks <= 5; ++ranks)
    for (int64_t micro_batches = 1; micro_batches <= 8; ++micro_batches)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        CAPTURE(ranks, micro_batches, rank);
        CHECK(peak_activations(make_form("gpipe", ranks, micro_batches), rank) == micro_batches);
        CHECK(peak_activations(make_form("1f1b", ranks, micro_batches), rank) ==
              std::min(micro_batches, ranks - rank));
      }
  // Torch's own tables hold as many: 8 micro-batches on 2 ranks.
  for (const int64_t rank : {0, 1}) {
    CHECK(peak_activations(make_form("zb-v", 2, 8), rank) == 4);
    CHECK(peak_activations(make_form("dualpipe-v", 2, 8), rank) == 5);
    CHECK(peak_activations(make_form("looped-bfs", 2, 8), rank) == 16);
  }
  CHECK_THROWS_WITH(peak_activations(make_form("gpipe", 2, 4), 2), Contains("got rank 2"));
}

TEST_CASE("times follow costs, of all stages or of each, and of messages") {
  const PipelineSchedule schedule = make_form("1f1b", 2, 3);
  CHECK(makespan(schedule) == 12);
  CHECK(makespan(schedule, {{{2, 1, 3}}, 0}) == 24);
  // A message each way, in the first and in the last bubble.
  CHECK(makespan(make_form("1f1b", 2, 1), {{{1, 1, 1}}, 0.5}) == 7);
  // The slower stage works without a pause, between the first forward and the last backward.
  CHECK(makespan(schedule, {{{1, 1, 1}, {4, 4, 4}}, 0}) == 1 + 3 * 12 + 2);
  CHECK(bubble(schedule, {{{0, 0, 0}}, 0}) == 0);
}

TEST_CASE("messages in flight") {
  const PipelineSchedule gpipe = make_form("gpipe", 2, 3);
  CHECK(peak_messages(gpipe, {0, 1}) == 3);
  CHECK(peak_messages(gpipe, {1, 0}) == 1);
  CHECK(peak_messages(make_form("1f1b", 2, 3), {0, 1}) == 2);
  CHECK_THROWS_WITH(peak_messages(make_form("zb-v", 2, 3), {1, 2}),
                    Contains("the edge from stage 1 to stage 2"));
}

TEST_CASE("a table is drawn over time") {
  CHECK(to_string(make_form("1f1b", 2, 2)) ==
        "step      0   1   2   3   4   5   6   7   8\n"
        "rank 0  0F0 0F1   .   . 0B0   -   . 0B1   -\n"
        "rank 1    . 1F0 1B0   - 1F1 1B1   -   .   .\n");
}

}  // namespace trireme::schedule_costs_test
