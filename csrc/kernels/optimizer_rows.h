#pragma once

#include <trireme/kernels/optimizer_step.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

// Leads from lists of tensors to segments; only optimizer_step.cpp and its kernels use it.
namespace trireme {

// Is one parameter with what belongs to it. The tensors are the caller's.
struct OptimizerRow {
  const at::Tensor& param;
  const at::Tensor& grad;
  // These are exp_avg or momentum_buffer, exp_avg_sq, max_exp_avg_sq; nullptr where there is none.
  std::array<const at::Tensor*, 3> states;
};

// Holds segments that one call of a kernel can take.
struct OptimizerBatch {
  c10::Device device;
  SegmentDtypes dtypes;
  double step;  // 0 where it is counted on the device, and for SGD
  std::vector<OptimizerSegment> segments;
  std::vector<const float*> counters;  // on the device; empty unless counted there
};

// Refuses what optimizer_step.h does not promise to take. `area` is the optimizer.
void check_row(std::string_view area, size_t index, const OptimizerRow& row);

// Makes segments of rows, by way of copies for memory that is not dense or not in the parameter's
// order.
class DenseRows {
 public:
  // The result is valid while the row's tensors and this object are.
  OptimizerSegment segment_of(const OptimizerRow& row, bool write_grad);

  // Writes the copies back, after the kernels.
  void finish();

 private:
  enum class Access : uint8_t { kRead, kWrite };
  void* memory_of(const at::Tensor& tensor, const at::Tensor& pattern, Access access);

  struct Copy {
    at::Tensor original;
    at::Tensor copy;
    Access access;
  };
  std::vector<Copy> copies_;
};

}  // namespace trireme
