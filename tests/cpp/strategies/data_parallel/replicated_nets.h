#pragma once

// Nets that the tests of DataParallel replicate, and one process on the whole batch beside them.

#include <trireme/strategies/data_parallel/data_parallel.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <strategies/values.h>
#include <string>
#include <vector>

namespace trireme::test {

// Layers of all kinds on rows of six characters; no statistics of the batch.
struct LayersImpl : torch::nn::Cloneable<LayersImpl> {
  LayersImpl() { reset(); }
  void reset() override {
    embed = register_module("embed", torch::nn::Embedding(20, 8));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    dropout = register_module("dropout", torch::nn::Dropout(0.0));
    out = register_module(
        "out",
        torch::nn::Sequential(torch::nn::Linear(8, 12), torch::nn::ReLU(),
                              torch::nn::Linear(torch::nn::LinearOptions(12, 4).bias(false))));
  }
  at::Tensor forward(const at::Tensor& characters) {
    const at::Tensor seen = conv(embed(characters).transpose(1, 2)).transpose(1, 2);
    return out->forward(dropout(norm(seen)).mean(1));
  }
  torch::nn::Embedding embed{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Sequential out{nullptr};
};
TORCH_MODULE(Layers);

// Small whole numbers, of which sums in any order have the same bits.
struct WholeNumbersImpl : torch::nn::Cloneable<WholeNumbersImpl> {
  WholeNumbersImpl() { reset(); }
  void reset() override {
    const auto numbers = [](at::IntArrayRef sizes) {
      return at::arange(c10::multiply_integers(sizes), at::kFloat).remainder(5).sub(2).view(sizes);
    };
    first = register_parameter("first", numbers({4, 6}));
    second = register_parameter("second", numbers({6, 3}));
    unused = register_parameter("unused", numbers({2}));
    frozen = register_parameter("frozen", numbers({3}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::mm(at::relu(at::mm(x, first)), second) * frozen;
  }
  at::Tensor first, second, unused, frozen;
};
TORCH_MODULE(WholeNumbers);

inline at::Tensor whole_rows(int64_t rows) {
  return at::arange(rows * 4, at::kFloat).remainder(7).sub(3).view({rows, 4});
}

template <typename Net>
Net seeded() {
  torch::manual_seed(7);
  return Net();
}

inline at::Tensor characters(int64_t step, int64_t rows) {
  return (at::arange(rows * 6, at::kLong) * (step + 3) + step).remainder(20).view({rows, 6});
}
inline at::Tensor classes(int64_t step, int64_t rows) {
  return (at::arange(rows, at::kLong) + step).remainder(4);
}
inline at::Tensor cross_entropy(const at::Tensor& output, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(output, target);
}

inline Values copies_of(const Values& tensors) {
  Values copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

// Undefined where there is none.
inline Values gradients_of(const torch::nn::Module& module) {
  Values gradients;
  for (const at::Tensor& parameter : module.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return gradients;
}

// Steps of AdamW on batches of `rows`; what the parameters are then, and the losses.
template <typename Model>
Values train(Model& model, int64_t steps, int64_t rows) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  Values losses;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss =
        cross_entropy(model->forward(characters(step, rows)), classes(step, rows));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  Values values = copies_of(model->parameters());
  values.insert(values.end(), losses.begin(), losses.end());
  return values;
}

inline DataParallelOptions on_cpu(int64_t replicas) {
  DataParallelOptions options;
  options.replicas = replicas;
  return options;
}

}  // namespace trireme::test
