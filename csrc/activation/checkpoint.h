#pragma once

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/forward_state.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/export.h>
#include <trireme/module/for_each_tensor.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {

// How a function is checkpointed.
struct CheckpointOptions {
  bool preserve_rng_state = true;  // a recomputation draws the random numbers of the forward
  bool early_stop = true;          // it ends with the last tensor that is needed
  bool check_determinism = true;   // it compares shape, dtype and device of what is saved
  std::string name;                // of the function, for messages
  c10::intrusive_ptr<TensorPacker> partition;  // of ranks with equal inputs: make_partition_packer
};

// Calls function(inputs...) and returns what it returns; of what autograd would save in it only the
// inputs are kept, and the backward calls it once more.
//
// Bits are those of a plain call: random numbers (of the CPU and of the devices of inputs) and
// autocast are those of the forward, and the caller's go on as if there had been one call. Several
// backwards, double backward, nested checkpoints and a backward inside of the function work. Inputs
// are any values; tensors are found in vectors, arrays, optionals, pairs, tuples and maps. The
// function is copied, as are inputs that are no tensors; parameters that it captures count, too.
//
// Throws what the function throws, also out of the backward; there CheckpointError where the
// function saves something else than in the forward, and c10::Error for inputs changed in place.
// Extra time: the forward of the function, 2 us. Cost of memory: the inputs. Torch's counterpart:
// torch.utils.checkpoint.checkpoint(use_reentrant=False), which C++ does not have.
template <typename Function, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  using Result = std::invoke_result_t<Function&, Inputs...>;
  if (!at::GradMode::is_enabled()) {
    return static_cast<Result>(std::invoke(function, std::forward<Inputs>(inputs)...));
  }
  // The frame keeps the tensors themselves, as autograd does.
  std::tuple<std::decay_t<Inputs>...> kept(inputs...);
  std::vector<at::Tensor> tensors;
  for_each_tensor(kept, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, {})); });
  auto again = [function = std::decay_t<Function>(function), kept = std::move(kept),
                state = ForwardState::capture(options.preserve_rng_state, tensors)](
                   const std::vector<at::Tensor>& unpacked) mutable {
    auto arguments = kept;
    size_t next = 0;
    for_each_tensor(arguments, [&](at::Tensor& tensor) { tensor = unpacked[next++]; });
    const ForwardStateGuard guard(state);
    std::apply([&](auto&... each) { static_cast<void>(std::invoke(function, each...)); },
               arguments);
  };
  auto frame = c10::make_intrusive<CheckpointFrame>(
      std::move(again), tensors,
      CheckpointFrame::Options{options.early_stop, options.check_determinism, options.name,
                               options.partition});
  const CheckpointForward forward(frame);
  return static_cast<Result>(std::invoke(function, std::forward<Inputs>(inputs)...));
}

template <typename Function, typename... Inputs>
  requires std::invocable<Function&, Inputs...>
auto checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace trireme
