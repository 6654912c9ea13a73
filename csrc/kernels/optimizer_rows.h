#pragma once

#include <trireme/kernels/optimizer_step.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

// Turns lists of tensors into segments; only optimizer_step.cpp and its kernels use it.
namespace trireme {

// One parameter with its gradient and states. The tensors are the caller's.
struct OptimizerRow {
  const at::Tensor& param;
  const at::Tensor& grad;
  // exp_avg or momentum_buffer, exp_avg_sq, max_exp_avg_sq; nullptr for missing ones.
  std::array<const at::Tensor*, 3> states;
};

// Segments that one call of a kernel can take.
struct OptimizerBatch {
  c10::Device device;
  SegmentDtypes dtypes;
  double step;  // 0 if counted on the device, and for SGD
  std::vector<OptimizerSegment> segments;
  std::vector<const float*> counters;  // on the device; empty unless counted there
};

// Throws for tensors that optimizer_step.h does not accept. `area` is the optimizer.
void check_row(std::string_view area, size_t index, const OptimizerRow& row);

// Makes segments of rows, by way of copies for memory that is not dense or not in the parameter's
// order.
class DenseRows {
 public:
  // Returns a segment that is valid while the row's tensors and this object are.
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
