// Which layers a rule freezes: pure values.

#include <trireme/pipetransformer/freeze_rule.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "catch_torch.h"

namespace trireme::freeze_rule_test {

using Counts = std::vector<int64_t>;

TEST_CASE("schedules of PipeTransformer") {
  CHECK(freeze_schedule(12, 1.0 / 3, 8) == Counts{0, 4, 7, 9, 10, 11, 11, 12});
  CHECK(freeze_schedule(12, 0.07, 10) == Counts{0, 1, 2, 3, 4, 4, 5, 5, 6, 6});
  CHECK(freeze_schedule(24, 1.0 / 3, 9) == Counts{0, 8, 14, 17, 20, 21, 22, 23, 24});
  CHECK(freeze_schedule(12, 0.5, 0).empty());
  CHECK_THAT(test::error_of([] { freeze_schedule(12, 1, 0); }),
             Catch::Contains("got alpha 1, expected"));
}

TEST_CASE("up to the smallest gradient, or as far as alpha lets") {
  int64_t frozen = 0;
  Counts found;
  for (const std::vector<double>& norms : std::vector<std::vector<double>>{
           {3, 1, 2, 5, 6, 7, 8, 9}, {4, 3, 2, 1, 5, 6}, {1, 2, 3, 4}, {9, 9, 1}, {2, 1}}) {
    frozen = frozen_by_gradient({8, frozen, 0, norms}, 1.0 / 3);
    found.push_back(frozen);
  }
  CHECK(found == Counts{2, 4, 5, 6, 7});
}

TEST_CASE("what has no finite norm ends the search") {
  const double inf = std::numeric_limits<double>::infinity();
  const double none = std::numeric_limits<double>::quiet_NaN();
  CHECK(frozen_by_gradient({4, 0, 0, {3, 2, inf, 1}}, 0.9) == 2);
  CHECK(frozen_by_gradient({4, 1, 0, {none, 2, 1}}, 0.9) == 1);
  CHECK(frozen_by_gradient({4, 4, 0, {}}, 0.9) == 4);
}

}  // namespace trireme::freeze_rule_test
