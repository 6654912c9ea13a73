#include <trireme/activation/kept_results.h>

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/saved_tensor_hooks.h>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <iterator>
#include <utility>

// See [Note: what a recomputation finds changed] in kept_results.h.

namespace trireme {

CheckpointRun::~CheckpointRun() = default;

bool may_be_in_checkpoint() {
  return CheckpointFrame::is_under_way() || SavedTensorHooks::get().may_have_runs_of_others();
}

bool is_checkpoint_under_way() {
  return CheckpointFrame::is_under_way() || !SavedTensorHooks::get().runs_of_others().empty();
}

std::vector<at::Tensor> once_per_forward(const std::function<std::vector<at::Tensor>()>& read) {
  CheckpointRuns runs = CheckpointFrame::runs();
  CheckpointRuns others = SavedTensorHooks::get().runs_of_others();
  std::move(others.begin(), others.end(), std::back_inserter(runs));
  if (runs.empty()) return read();
  // Selective policies count operators in forward and recomputation; here they see none.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<at::Tensor> result;
  for (const auto& run : runs) {
    if (!run->is_recomputation()) continue;
    std::vector<at::Tensor> kept = run->take();  // every run takes, to stay in step
    if (result.empty()) result = std::move(kept);
  }
  if (result.empty()) result = read();
  for (const auto& run : runs)
    if (!run->is_recomputation()) run->keep(result);
  // The function may write to its result.
  for (at::Tensor& tensor : result) tensor = tensor.clone();
  return result;
}

}  // namespace trireme
