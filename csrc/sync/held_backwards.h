#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Is a strategy that averages gradients of backwards, to a pipeline whose step has a backward for
// each micro-batch: it is to average those of the last one alone, with what came before. The thread
// that trains calls it.
class TRIREME_API HeldBackwards {
 public:
  virtual ~HeldBackwards() = default;
  // While it is held, only those backwards synchronize that prepare_for_backward() has asked for.
  virtual void hold(bool held) = 0;
  // Makes the next backward synchronize, unless the user has said that none is to (no_sync).
  virtual void prepare_for_backward() = 0;
  // Takes part in a synchronization that was prepared, if no backward since has reached an output
  // or a parameter. Collective if it does.
  virtual void synchronize_unreached() = 0;
  // Tells `text` to the ranks that may wait for this one.
  virtual void announce_failure(const std::string& text) noexcept = 0;
};

// Says which strategy averages the gradients of these parameters, as long as it lives. Keeps
// neither of them alive. Thread-safe.
TRIREME_API void put_held_backwards(const std::vector<at::Tensor>& parameters,
                                    const std::shared_ptr<HeldBackwards>& strategy);
// Returns the living one of a parameter, or null. Thread-safe.
TRIREME_API std::shared_ptr<HeldBackwards> held_backwards_of(const at::Tensor& parameter);

}  // namespace trireme
