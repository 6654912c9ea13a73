#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The interface through which a pipeline, whose step has a backward for each micro-batch, defers a
// strategy's averaging to the last one, which then averages all gradients since. Called on the
// training thread.
class TRIREME_API DeferredSync {
 public:
  virtual ~DeferredSync() = default;
  // Holds or releases backwards: held ones synchronize only after prepare_for_backward().
  virtual void hold(bool held) = 0;
  // Makes the next backward synchronize, unless the user has asked for none to (no_sync).
  virtual void prepare_for_backward() = 0;
  // Takes part in a synchronization that was prepared, if no backward since has reached an output
  // or a parameter. Collective if it does.
  virtual void synchronize_unreached() = 0;
  // Tells `text` to the ranks that may wait for this one.
  virtual void announce_failure(const std::string& text) noexcept = 0;
};

// Registers the strategy that averages the gradients of these parameters, as long as it lives.
// Keeps neither of them alive. Thread-safe.
TRIREME_API void put_deferred_sync(const std::vector<at::Tensor>& parameters,
                                   const std::shared_ptr<DeferredSync>& strategy);
// Returns the living strategy of a parameter, or null. Thread-safe.
TRIREME_API std::shared_ptr<DeferredSync> deferred_sync_of(const at::Tensor& parameter);

}  // namespace trireme
