#pragma once

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/forward_state.h>
#include <trireme/activation/offload.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/module/for_each_tensor.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {

// How a function is checkpointed.
struct CheckpointOptions {
  bool preserve_rng_state = true;     // a recomputation draws the random numbers of the forward
  bool early_stop = true;             // a recomputation ends with the last tensor needed
  bool check_determinism = true;      // compares shape, dtype, device of saved tensors
  std::string name = "the function";  // for messages
  std::optional<ActivationOffload> offload;              // recomputes nothing
  c10::intrusive_ptr<SavedTensorPacker> partition = {};  // by ranks that share inputs: partition.h
};

// A C++ function and its inputs, kept for the recomputation.
template <typename Function, typename... Inputs>
class CheckpointedFunction : public CheckpointedCall {
 public:
  // Takes the tensors out of `inputs`, for the frame to keep as autograd does.
  CheckpointedFunction(Function function, std::tuple<Inputs...> inputs, std::string name,
                       bool with_random)
      : function_(std::move(function)), inputs_(std::move(inputs)), name_(std::move(name)) {
    for_each_tensor(inputs_,
                    [&](at::Tensor& tensor) { tensors_.push_back(std::exchange(tensor, {})); });
    state_ = ForwardState::capture(with_random, tensors_);
  }

  // Gives away the tensors that the constructor took.
  std::vector<at::Tensor> take_tensors() { return std::exchange(tensors_, {}); }

  void run(const std::vector<at::Tensor>& unpacked) override {
    auto inputs = inputs_;
    size_t next = 0;
    for_each_tensor(inputs, [&](at::Tensor& tensor) { tensor = unpacked[next++]; });
    const ForwardStateGuard guard(state_);
    try {
      std::apply([&](auto&... each) { static_cast<void>(std::invoke(function_, each...)); },
                 inputs);
    } catch (...) {
      if (!SavedTensorHooks::get().is_stop(std::current_exception())) throw;
    }
  }

  std::string name() const override { return name_; }

 private:
  Function function_;
  std::tuple<Inputs...> inputs_;
  std::vector<at::Tensor> tensors_;
  ForwardState state_;
  std::string name_;
};

// Calls function(inputs...) and returns its result. Instead of the tensors that autograd would
// save, only the inputs are kept; the backward calls the function once more.
//
// Results are bit for bit those of a plain call: a recomputation has the random numbers (of the CPU
// and of the devices of inputs) and the autocast state of the forward, and the caller's go on as if
// there had been one call. Several backwards, double backward, nested checkpoints and a backward
// inside of the function work. Inputs may have any type; tensors are found in vectors, arrays,
// optionals, pairs, tuples and maps. The function is copied, as are inputs that are no tensors;
// parameters that it captures get gradients, too.
//
// Throws what the function throws, also out of the backward; the backward also throws
// CheckpointError where the function saves other tensors than in the forward, and c10::Error for
// inputs changed in place. Extra time: the function's forward and 2 us. Memory: the inputs. Torch's
// counterpart: torch.utils.checkpoint.checkpoint(use_reentrant=False), which C++ does not have.
template <typename Function, typename... Inputs>
std::invoke_result_t<Function&, Inputs...> checkpoint(const CheckpointOptions& options,
                                                      Function&& function, Inputs&&... inputs) {
  using Result = std::invoke_result_t<Function&, Inputs...>;
  if (!at::GradMode::is_enabled()) {
    return static_cast<Result>(std::invoke(function, std::forward<Inputs>(inputs)...));
  }
  if (options.offload) {
    TORCH_CHECK_VALUE(!options.partition,
                      error_text("checkpoint", "got offload and partition, expected one of them",
                                 {}, "Leave one out: what is offloaded is not recomputed."));
    const PackerGuard guard(make_offload_packer(*options.offload));
    return static_cast<Result>(std::invoke(function, std::forward<Inputs>(inputs)...));
  }
  using Call = CheckpointedFunction<std::decay_t<Function>, std::decay_t<Inputs>...>;
  auto call = std::make_unique<Call>(function, std::tuple<std::decay_t<Inputs>...>(inputs...),
                                     options.name, options.preserve_rng_state);
  const std::vector<at::Tensor> tensors = call->take_tensors();
  auto frame = c10::make_intrusive<CheckpointFrame>(
      std::move(call), tensors,
      CheckpointFrame::Options{options.early_stop, options.check_determinism, options.partition});
  const auto forward = [&]() -> Result {
    const CheckpointForward guard(frame);
    return std::invoke(function, std::forward<Inputs>(inputs)...);
  };
  if constexpr (std::is_void_v<Result>) {
    forward();
    frame->warn_if_useless();
  } else {
    Result result = forward();
    frame->warn_if_useless();
    return result;
  }
}

template <typename Function, typename... Inputs>
  requires std::invocable<Function&, Inputs...>
std::invoke_result_t<Function&, Inputs...> checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace trireme
