#pragma once

#include <trireme/grad/codes/gradient_coder.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The codes of buckets that a communication hook sees.
class TRIREME_API HookCoder {
 public:
  // Collective. Throws ValueError for bad arguments, and where ranks compress in other ways.
  HookCoder(std::shared_ptr<Communicator> ranks, const Compression& compression);

  // Averages a bucket of these parameters in place: the one of that index in a step, whose first is
  // 0. Waits for the average.
  void average(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
               const std::vector<std::string>& names, int64_t index);

 private:
  std::shared_ptr<Communicator> ranks_;
  std::unique_ptr<GradientCoder> coder_;  // null where nothing is compressed
};

}  // namespace trireme
