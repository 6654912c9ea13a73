#include <trireme/module/output_hook.h>

#include <trireme/module/compiled_autograd.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <utility>

namespace trireme {
namespace {

using torch::autograd::variable_list;

// Autograd shows all gradients of a node with several outputs; ours is at `place`.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(size_t place, std::function<void()> arrived)
      : place_(place), arrived_(std::move(arrived)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients[place_].defined()) arrived_();
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    refuse_compiled_autograd();
  }

 private:
  size_t place_;
  std::function<void()> arrived_;
};

}  // namespace

void on_gradient(const at::Tensor& output, std::function<void()> arrived) {
  output.grad_fn()->add_tensor_pre_hook(
      std::make_unique<OutputHook>(static_cast<size_t>(output.output_nr()), std::move(arrived)));
}

void on_output_gradient(const at::Tensor& output, std::function<void()> arrived,
                        uint64_t first_node) {
  at::Tensor base;
  if (output.is_view()) base = output._base();
  const bool is_made_here =
      base.defined() && base.grad_fn() && base.grad_fn()->sequence_nr() >= first_node;
  if (!is_made_here) return on_gradient(output, std::move(arrived));
  const auto seen_in = std::make_shared<std::atomic<int>>(-1);  // the graph task
  on_gradient(output, [seen_in, arrived] {
    *seen_in = torch::autograd::get_current_graph_task_id();
    arrived();
  });
  on_gradient(base, [seen_in, arrived = std::move(arrived)] {
    if (*seen_in != torch::autograd::get_current_graph_task_id()) arrived();
  });
}

}  // namespace trireme
