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

// The state besides its inputs that a function reads, so that a second call does the same: random
// number generators (of the CPU, of the devices of its inputs, or of the replica that it runs in)
// and autocast. Grad mode is not part of it: a recomputation has it on.
class TRIREME_API ForwardState {
 public:
  // Captures the state of the CPU and of the devices of `inputs`. Costs a copy of 2.5 KB for the
  // CPU's generator.
  static ForwardState capture(bool with_random, const std::vector<at::Tensor>& inputs);

 private:
  friend class ForwardStateGuard;

  // The state of the CPU's generator, copied without making a tensor of it.
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
  // Returns the present values of the state that restore() overwrites.
  ForwardState present() const;

  std::optional<CpuRandom> cpu_random_;
  std::vector<Random> random_;
  std::optional<at::Generator> replica_;  // each recomputation clones it
  std::vector<Autocast> autocast_;
  bool caches_casts_ = true;
};

// A scope in which a captured state is restored; the previous state returns at its end.
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
