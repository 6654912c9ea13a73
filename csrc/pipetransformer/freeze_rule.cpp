#include <trireme/pipetransformer/freeze_rule.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace trireme {
namespace {

// A third of 12 layers is 4 of them, though 12 (1 - (1 - 1.0 / 3)) is a little more in fp64.
constexpr double kRounding = 1e-9;

int64_t rounded_up(double layers) { return static_cast<int64_t>(std::ceil(layers - kRounding)); }

}  // namespace

int64_t frozen_by_schedule(int64_t layers, double alpha, int64_t epoch) {
  TORCH_CHECK_VALUE(
      alpha > 0 && alpha < 1,
      error_text("freeze", c10::str("got alpha ", alpha, ", expected a number between 0 and 1"), {},
                 "Pass the share of the layers still trained that an interval freezes, as 1/3."));
  TORCH_CHECK_VALUE(
      layers >= 0 && epoch >= 0,
      error_text("freeze",
                 c10::str("got ", layers, " layers and epoch ", epoch, ", expected none below 0"),
                 {}, "Count both from 0 on."));
  const auto all = static_cast<double>(layers);
  return rounded_up(all * (1 - std::pow(1 - alpha, static_cast<double>(epoch))));
}

std::vector<int64_t> freeze_schedule(int64_t layers, double alpha, int64_t epochs) {
  frozen_by_schedule(layers, alpha, epochs);  // also where there is no epoch
  std::vector<int64_t> frozen;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    frozen.push_back(frozen_by_schedule(layers, alpha, epoch));
  return frozen;
}

int64_t frozen_by_gradient(const FreezePoint& point, double alpha) {
  const auto end = std::find_if_not(point.norms.begin(), point.norms.end(),
                                    [](double norm) { return std::isfinite(norm); });
  if (end == point.norms.begin()) return point.frozen;
  const auto least = std::min_element(point.norms.begin(), end);
  const int64_t up_to_least = point.frozen + std::distance(point.norms.begin(), least) + 1;
  const auto frozen = static_cast<double>(point.frozen);
  return std::min(up_to_least,
                  rounded_up(frozen + alpha * (static_cast<double>(point.layers) - frozen)));
}

}  // namespace trireme
