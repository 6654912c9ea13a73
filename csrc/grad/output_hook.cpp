#include <trireme/grad/output_hook.h>

#include <trireme/grad/grad_hook.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace trireme {
namespace {

using torch::autograd::variable_list;

// Of a node with several outputs autograd shows all gradients; ours is at `place`.
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

void on_output_gradient(const at::Tensor& output, std::function<void()> arrived) {
  output.grad_fn()->add_tensor_pre_hook(
      std::make_unique<OutputHook>(static_cast<size_t>(output.output_nr()), std::move(arrived)));
}

}  // namespace trireme
