#include <trireme/strategies/fsdp/module_mirror.h>

#include <trireme/strategies/fsdp/sharded_module.h>

#include <memory>
#include <ostream>
#include <utility>

namespace trireme {
namespace {

// A module without a forward, for its name and its tensors.
class Mirror final : public torch::nn::Module {
 public:
  explicit Mirror(std::shared_ptr<const torch::nn::Module> source)
      : Module(source->name()), source_(std::move(source)) {}
  void pretty_print(std::ostream& stream) const override { source_->pretty_print(stream); }
  bool is_serializable() const override { return source_->is_serializable(); }

  // Returns undefined parameters, too (a Linear without bias), which the public functions leave out
  // and archives hold.
  static const auto& parameters_of(const torch::nn::Module& module) {
    return module.*(&Mirror::parameters_);
  }

 private:
  std::shared_ptr<const torch::nn::Module> source_;
};

}  // namespace

void fill_mirror(torch::nn::Module& target, const torch::nn::Module& source,
                 const Replacements& replacements) {
  for (const auto& item : Mirror::parameters_of(source)) {
    const at::Tensor& own = item.value();
    const auto found = replacements.find(own.unsafeGetTensorImpl());
    target.register_parameter(item.key(), found == replacements.end() ? own : found->second,
                              own.defined() && own.requires_grad());
  }
  for (const auto& item : source.named_buffers(/*recurse=*/false))
    target.register_buffer(item.key(), item.value());
  for (const auto& item : source.named_children()) {
    std::shared_ptr<torch::nn::Module> child = item.value();
    if (dynamic_cast<const ShardedModule*>(child.get()) == nullptr) {
      child = std::make_shared<Mirror>(item.value());
      fill_mirror(*child, *item.value(), replacements);
    }
    target.register_module(item.key(), std::move(child));
  }
}

}  // namespace trireme
