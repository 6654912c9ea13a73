#pragma once

#include <trireme/common/export.h>

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A strategy whose ranks read each other's parameters, and that is asked before an optimizer writes
// one. C++ optimizers have no hooks, so trireme::step() and the optimizers of flat_optimizer.h ask.
class TRIREME_API WriteGate {
 public:
  virtual ~WriteGate() = default;
  // Called on the thread that steps, for each parameter of each step; may wait for other ranks, and
  // throw.
  virtual void before_write(const at::Tensor& parameter) = 0;
  // Returns which part of a parameter this rank has, "rank 0 of 2"; empty: all of it.
  virtual std::string held_part() const { return {}; }
};

// Registers `gate`, as long as it lives, to be asked before these are written. Keeps neither the
// gate nor the parameters alive. Thread-safe.
TRIREME_API void put_gate(const std::vector<at::Tensor>& parameters,
                          const std::shared_ptr<WriteGate>& gate);
// Returns the living gate of a parameter, or null. Thread-safe.
TRIREME_API std::shared_ptr<WriteGate> gate_of(const at::Tensor& parameter);

// Asks the gates of all parameters of an optimizer, in their order, and has snapshots of them kept
// (memory/snapshot.h). Costs 0.1 us per parameter where there is any gate.
TRIREME_API void pass_gates(const torch::optim::Optimizer& optimizer);

// Calls optimizer.step(closure) of any torch::optim::Optimizer, behind the gates of its parameters;
// the closure runs before them.
TRIREME_API at::Tensor step(torch::optim::Optimizer& optimizer,
                            torch::optim::Optimizer::LossClosure closure = nullptr);

}  // namespace trireme
