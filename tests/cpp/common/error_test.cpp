#include <trireme/common/error.h>

#include <trireme/common/version.h>

#include "catch_torch.h"

namespace trireme::error_test {

TEST_CASE("an error names area, rank and next step") {
  CHECK(error_text("area", "got 1, expected 2", {2, 8}, "Do that.") ==
        "[area] got 1, expected 2 (rank 2 of 8). Do that.");
}

TEST_CASE("without a group an error names no rank") {
  CHECK(error_text("area", "got 1, expected 2", {}, "Do that.") ==
        "[area] got 1, expected 2. Do that.");
}

}  // namespace trireme::error_test
