#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <vector>

namespace trireme {

// What a function reads besides its inputs, so that a second call does the same: the random numbers
// to come (of the CPU, of the devices of its inputs, or of the replica that it runs in) and
// autocast. Grad mode is not among it: a recomputation has it on.
class TRIREME_API ForwardState {
 public:
  // `inputs` say which devices count besides the CPU. Costs a copy of 2.5 KB for the CPU's
  // generator.
  static ForwardState capture(bool with_random, const std::vector<at::Tensor>& inputs);

 private:
  friend class ForwardStateGuard;

  // Those to come from the CPU's generator, which can be had without making a tensor of them.
  struct CpuRandom {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  struct Random {
    at::Generator generator;
    at::Tensor state;
  };
  struct Autocast {
    c10::DeviceType device;
    bool is_enabled;
    at::ScalarType dtype;
  };

  static CpuRandom cpu_random();
  static Random random_of(const at::Generator& generator);
  void restore() const;
  // Returns what restore() is about to overwrite.
  ForwardState present() const;

  std::optional<CpuRandom> cpu_random_;
  std::vector<Random> random_;
  std::optional<at::Generator> replica_;  // a copy, of which each recomputation draws from another
  std::vector<Autocast> autocast_;
  bool caches_casts_ = true;
};

// Brings a state back as long as it lives; then that of before is back.
class TRIREME_API ForwardStateGuard {
 public:
  explicit ForwardStateGuard(const ForwardState& state);
  ~ForwardStateGuard();
  ForwardStateGuard(const ForwardStateGuard&) = delete;
  ForwardStateGuard& operator=(const ForwardStateGuard&) = delete;

 private:
  class Replica;

  ForwardState before_;
  std::unique_ptr<Replica> replica_;
};

}  // namespace trireme
