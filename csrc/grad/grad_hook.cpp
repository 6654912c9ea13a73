#include <trireme/grad/grad_hook.h>

#include <trireme/module/compiled_autograd.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

namespace trireme {
namespace {

using torch::autograd::variable_list;

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(int64_t index, GradSink& sink) : index_(index), sink_(sink) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    sink_.gradient_ready(index_, inputs[0].defined());
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    refuse_compiled_autograd();
  }

 private:
  int64_t index_;
  GradSink& sink_;
};

class DueHook final : public torch::autograd::FunctionPreHook {
 public:
  DueHook(int64_t index, GradSink& sink) : index_(index), sink_(sink) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients[0].defined()) sink_.gradient_due(index_);
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    refuse_compiled_autograd();
  }

 private:
  int64_t index_;
  GradSink& sink_;
};

// Returns whether both refer to one node. The strong reference keeps it in its place, so that
// addresses tell, without the atomic operations that locking the weak one would cost per parameter
// and forward.
template <typename Weak, typename Strong>
bool is_same_node(const Weak& weak, const Strong& strong) {
  if constexpr (requires { weak._unsafe_get_target(); }) {
    return weak._unsafe_get_target() == strong.get();
  } else {
    return !weak.owner_before(strong) && !strong.owner_before(weak);
  }
}

}  // namespace

GradHook::GradHook(const at::Tensor& parameter, int64_t index, GradSink& sink, bool also_before)
    : node_(torch::autograd::impl::grad_accumulator(parameter)) {
  TORCH_INTERNAL_ASSERT(node_, "[grad_hook] parameter ", index, " does not require a gradient");
  key_ = node_->add_post_hook(std::make_unique<ReadyHook>(index, sink));
  if (!also_before) return;
  auto before = std::make_unique<DueHook>(index, sink);
  before_ = before.get();
  node_->add_pre_hook(std::move(before));
}

bool GradHook::is_attached_to(const at::Tensor& parameter) const {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return node_ && meta != nullptr && is_same_node(meta->grad_accumulator_, node_);
}

bool GradHook::is_visited_by(
    const std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>& visited)
    const {
  const auto entry = visited.find(node_.get());
  return entry != visited.end() && entry->second.needed_;
}

void GradHook::detach() noexcept {
  if (node_) {
    node_->del_post_hook(key_);
    std::erase_if(node_->pre_hooks(), [&](const auto& hook) { return hook.get() == before_; });
  }
  node_.reset();
}

}  // namespace trireme
