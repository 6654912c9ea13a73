#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace trireme {

// Which rank of how many reports. A negative world means that no group is known yet; the text then
// names none.
struct RankOf {
  int64_t rank = -1;
  int64_t world = -1;
};

// Returns a text in the one form of every message of this library:
//   [area] what went wrong, got and expected (rank r of w). next step
// Torch-free, so that every layer can use it; the place that throws the text decides its type.
TRIREME_API std::string error_text(std::string_view area, std::string_view what, RankOf where,
                                   std::string_view next_step);

}  // namespace trireme
