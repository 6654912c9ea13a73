#include <trireme/pipetransformer/layer_costs.h>

#include <trireme/activation/checkpoint_sequential.h>
#include <trireme/activation/forward_state.h>
#include <trireme/common/stream.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace trireme {
namespace {

constexpr int kRuns = 5;

double seconds_now(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

struct TimedRun {
  double forward = 0;
  double backward = 0;
  at::Tensor output = {};
};

TimedRun run(const torch::nn::Sequential& layers, int64_t layer, const at::Tensor& given) {
  const at::AutoGradMode with_gradients(true);
  at::Tensor input = given.detach().clone();
  std::vector<at::Tensor> wanted;
  if (layer > 0 && (input.is_floating_point() || input.is_complex())) {
    input.set_requires_grad(true);
    wanted.push_back(input);
  }
  for (const at::Tensor& parameter : layers->children()[static_cast<size_t>(layer)]->parameters())
    if (parameter.requires_grad()) wanted.push_back(parameter);
  const double begin = seconds_now(input.device());
  // A layer may work in place, which a leaf would not take.
  at::Tensor output = run_layers(layers, layer, layer + 1,
                                 input.requires_grad() ? input.view_as(input).clone() : input);
  const double middle = seconds_now(input.device());
  if (output.requires_grad() && !wanted.empty())
    torch::autograd::grad({output}, wanted, {at::ones_like(output)}, /*retain_graph=*/false,
                          /*create_graph=*/false, /*allow_unused=*/true);
  return {middle - begin, seconds_now(input.device()) - middle, output.detach()};
}

// Puts buffers back as they were at its end.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& module) : buffers_(module.buffers()) {
    for (const at::Tensor& buffer : buffers_)
      copies_.push_back(buffer.defined() ? buffer.clone() : buffer);
  }
  ~KeptBuffers() {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i)
      if (buffers_[i].defined()) buffers_[i].copy_(copies_[i]);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<at::Tensor> buffers_, copies_;
};

}  // namespace

LayerSeconds measure_layers(torch::nn::Sequential layers, const at::Tensor& sample) {
  const ForwardState state = ForwardState::capture(/*with_random=*/true, {sample});
  const ForwardStateGuard random_as_before(state);
  const KeptBuffers buffers_as_before(*layers);
  MicroBatches batch;  // for layers that ask for it
  batch.inputs.push_back(PipelineValue{{sample}});
  const MicroBatchScope scope(batch, 0);
  LayerSeconds found;
  at::Tensor value = sample;
  for (int64_t layer = 0; layer < static_cast<int64_t>(layers->size()); ++layer) {
    TimedRun last = run(layers, layer, value);
    std::vector<double> forward, backward;
    for (int i = 0; i < kRuns; ++i) {
      last = run(layers, layer, value);
      forward.push_back(last.forward);
      backward.push_back(last.backward);
    }
    found.forward.push_back(median(std::move(forward)));
    found.backward.push_back(median(std::move(backward)));
    value = last.output;
  }
  return found;
}

}  // namespace trireme
