#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace trireme {

// Says which rank of how many speaks. A negative world means that no group is known yet; the text
// then names none.
struct RankOf {
  int64_t rank = -1;
  int64_t world = -1;
};

// Returns a text in the one form of every message of this library:
//   [area] what went wrong, got and expected (rank r of w). next step
// Torch-free, so that every layer can use it; who throws it, and as which type, is decided where it
// is thrown.
TRIREME_API std::string error_text(std::string_view area, std::string_view what, RankOf where,
                                   std::string_view next_step);

}  // namespace trireme
