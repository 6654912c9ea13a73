#include <trireme/activation/cached_prefix.h>

#include <trireme/common/error.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

using torch::nn::Module;

template <typename... Modules>
bool is_any_of(const Module& module) {
  return ((dynamic_cast<const Modules*>(&module) != nullptr) || ...);
}

// Returns whether a module does something else in training mode, as far as torch's classes go.
bool depends_on_mode(const Module& module) {
  namespace nn = torch::nn;
  return is_any_of<nn::DropoutImpl, nn::Dropout2dImpl, nn::Dropout3dImpl, nn::AlphaDropoutImpl,
                   nn::FeatureAlphaDropoutImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl,
                   nn::BatchNorm3dImpl, nn::RReLUImpl>(module);
}

std::vector<std::string> texts_of(const torch::nn::Sequential& layers) {
  std::vector<std::string> texts;
  for (const auto& layer : layers->children()) {
    std::ostringstream text;
    text << *layer;
    texts.push_back(text.str());
  }
  return texts;
}

// The layers as they are in a call.
class ModuleLayers final : public PrefixLayers {
 public:
  explicit ModuleLayers(torch::nn::Sequential& layers) : layers_(layers) {}

  void look(See see) const override {
    for (const auto& layer : layers_->children()) look_into(*layer, see);
  }

  std::vector<PrefixTensor> tensors() const override {
    std::vector<PrefixTensor> tensors;
    size_t number = 0;
    for (const auto& layer : layers_->named_children()) {
      const std::string prefix = "layers." + layer.key() + ".";
      for (const auto& item : layer.value()->named_parameters())
        tensors.push_back({number, prefix + item.key(), item.value()});
      for (const auto& item : layer.value()->named_buffers())
        tensors.push_back({number, prefix + item.key(), item.value()});
      ++number;
    }
    return tensors;
  }

  at::Tensor run(size_t first, const at::Tensor& input) override {
    at::Tensor value = input;
    size_t number = 0;
    for (auto layer = layers_->begin(); layer != layers_->end(); ++layer, ++number)
      if (number >= first) value = layer->forward(std::move(value));
    return value;
  }

 private:
  void look_into(const Module& module, See see) const {
    if (module.is_training() && depends_on_mode(module)) refuse_mode(module);
    for (const at::Tensor& parameter : module.parameters(false)) see(parameter, true);
    for (const at::Tensor& buffer : module.buffers(false)) see(buffer, false);
    for (const auto& child : module.children()) look_into(*child, see);
  }

  [[noreturn]] void refuse_mode(const Module& module) const {
    std::string name = "layers";
    for (const auto& inner : layers_->named_modules("layers"))
      if (inner.value().get() == &module) name = inner.key();
    C10_THROW_ERROR(ValueError, error_text("cache",
                                           "got '" + name + "', a " + module.name() +
                                               " in training mode, expected evaluation mode",
                                           {}, "Call eval() on the layers of the prefix."));
  }

  torch::nn::Sequential& layers_;
};

}  // namespace

CachedPrefixImpl::CachedPrefixImpl(torch::nn::Sequential layers,
                                   std::shared_ptr<ActivationCache> cache, bool always)
    : layers_(register_module("layers", std::move(layers))),
      outputs_(std::move(cache), texts_of(layers_), always) {}

at::Tensor CachedPrefixImpl::forward(const at::Tensor& input, const at::Tensor& ids) {
  ModuleLayers layers(layers_);
  return outputs_.forward(input, ids, layers);
}

}  // namespace trireme
