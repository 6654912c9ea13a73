#pragma once

#include <trireme/activation/activation_cache.h>
#include <trireme/activation/prefix_cache.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <memory>

namespace trireme {

// See CachedPrefix below.
class TRIREME_API CachedPrefixImpl : public torch::nn::Module {
 public:
  CachedPrefixImpl(torch::nn::Sequential layers, std::shared_ptr<ActivationCache> cache,
                   bool always = false);

  // Returns the outputs of the layers for a batch whose rows are the samples `ids`, without a
  // graph. Throws what PrefixCache::forward() throws, and ValueError for layers that depend on the
  // training mode that they are in.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& ids);

 private:
  torch::nn::Sequential layers_;
  PrefixCache outputs_;
};

// Frozen layers in front of a model, whose outputs are kept for each sample:
//
//   auto cache = std::make_shared<trireme::ActivationCache>(samples, bytes, ctx.communicator());
//   trireme::CachedPrefix prefix(frozen, cache);
//   auto loss = loss_of(ddp->forward(prefix->forward(x, ids)), y);
//
// The layers take and return one tensor, a row for each row. A prefix of more layers over the same
// cache goes on from what is there: only the new layers run. Each rank makes one. `always` stores
// rows whatever it costs to read them.
TORCH_MODULE(CachedPrefix);

}  // namespace trireme
