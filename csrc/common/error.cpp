#include <trireme/common/error.h>

namespace trireme {

std::string error_text(std::string_view area, std::string_view what, RankOf where,
                       std::string_view next_step) {
  std::string text = "[";
  text.append(area).append("] ").append(what);
  if (where.world >= 0) {
    text += " (rank " + std::to_string(where.rank) + " of " + std::to_string(where.world) + ")";
  }
  text.append(". ").append(next_step);
  return text;
}

}  // namespace trireme
