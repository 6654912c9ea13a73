#include <trireme/grad/module_parameters.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>

namespace trireme {

NamedParameters named_parameters(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> sparse;
  const auto look_at = [&](const torch::nn::Module& layer) {
    if (const auto* embedding = layer.as<torch::nn::EmbeddingImpl>()) {
      if (embedding->options.sparse()) sparse.insert(embedding->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = layer.as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) sparse.insert(bag->weight.unsafeGetTensorImpl());
    }
  };
  look_at(module);  // which may live on the stack, where torch cannot list it
  for (const auto& layer : module.modules(/*include_self=*/false)) look_at(*layer);
  NamedParameters parameters;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameters.names.push_back(item.key());
    parameters.tensors.push_back(parameter);
    parameters.sparse_gradient.push_back(sparse.count(parameter.unsafeGetTensorImpl()) > 0);
  }
  return parameters;
}

}  // namespace trireme
