#include <trireme/strategies/horovod/adasum.h>

#include <trireme/strategies/horovod/pass_counts.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace trireme::horovod {
namespace {

at::Tensor combined(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor a = one.to(at::kDouble);
  const at::Tensor b = other.to(at::kDouble);
  const at::Tensor dot = a.mul(b).sum();
  const auto scaled = [&](const at::Tensor& vector) {
    const at::Tensor square = vector.mul(vector).sum();
    const at::Tensor factor = at::where(square == 0, at::ones_like(dot), 1 - dot / (2 * square));
    return vector * factor;
  };
  return (scaled(a) + scaled(b)).to(one.scalar_type());
}

}  // namespace

void check_adasum_ranks(int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1 && (ranks & (ranks - 1)) == 0,
                    error_text(kArea,
                               "got Adasum over " + std::to_string(ranks) +
                                   " ranks, expected 2, 4, 8 or another power of 2",
                               {}, "Use hvd.Average."));
}

at::Tensor adasum(std::vector<at::Tensor> parts) {
  check_adasum_ranks(static_cast<int64_t>(parts.size()));
  while (parts.size() > 1) {
    std::vector<at::Tensor> pairs;
    for (size_t i = 0; i < parts.size(); i += 2) pairs.push_back(combined(parts[i], parts[i + 1]));
    parts = std::move(pairs);
  }
  return parts.front();
}

void adasum_over_ranks(const std::vector<at::Tensor>& tensors, Communicator& communicator,
                       const std::string& label) {
  check_adasum_ranks(communicator.world());
  if (communicator.world() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& tensor : tensors) {
    inputs.push_back(tensor.detach().reshape(-1).contiguous());
    outputs.push_back(at::empty({communicator.world() * tensor.numel()}, inputs.back().options()));
  }
  communicator.all_gather(outputs, inputs, label).wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor sum = adasum(outputs[i].view({communicator.world(), -1}).unbind());
    tensors[i].detach().copy_(sum.view(tensors[i].sizes()));
  }
}

}  // namespace trireme::horovod
