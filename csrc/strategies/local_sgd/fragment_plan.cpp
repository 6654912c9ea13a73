#include <trireme/strategies/local_sgd/fragment_plan.h>

#include <trireme/common/error.h>
#include <trireme/strategies/local_sgd/round_options.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <string>

namespace trireme {

std::vector<Fragment> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t count) {
  const auto parameters = static_cast<int64_t>(bytes.size());
  TORCH_CHECK_VALUE(
      count <= parameters,
      error_text(kRoundsArea,
                 "got fragments=" + std::to_string(count) + " of " + std::to_string(parameters) +
                     " parameters, expected at most one for each",
                 {}, "Pass fewer fragments."));
  const int64_t all = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  std::vector<Fragment> fragments(static_cast<size_t>(count));
  int64_t before = 0;  // bytes of the parameters that are dealt already
  int64_t current = 0;
  for (int64_t i = 0; i < parameters; ++i) {
    const int64_t own = bytes[static_cast<size_t>(i)];
    const bool is_begun = !fragments[static_cast<size_t>(current)].empty();
    // A run ends where most of the next parameter would lie beyond its end; later ones need one
    // parameter each.
    const bool is_full = 2 * before + own > 2 * all * (current + 1) / count;
    const bool must_end = parameters - i <= count - 1 - current;
    if (is_begun && current + 1 < count && (is_full || must_end)) ++current;
    fragments[static_cast<size_t>(current)].push_back(static_cast<size_t>(i));
    before += own;
  }
  return fragments;
}

std::vector<int64_t> deal_by_bytes(const std::vector<int64_t>& bytes, int64_t ranks) {
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t one, size_t other) { return bytes[one] > bytes[other]; });
  std::vector<int64_t> given(static_cast<size_t>(ranks));
  std::vector<int64_t> rank_of(bytes.size());
  for (const size_t parameter : order) {
    const auto least = std::min_element(given.begin(), given.end());
    *least += bytes[parameter];
    rank_of[parameter] = least - given.begin();
  }
  return rank_of;
}

}  // namespace trireme
