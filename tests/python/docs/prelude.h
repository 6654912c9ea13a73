// What the C++ blocks of the pages take for granted. They are compiled, not run.
#include <trireme/trireme.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  void reset() override;
  torch::Tensor forward(const torch::Tensor& inputs);
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

struct Rows : torch::data::datasets::Dataset<Rows> {
  torch::data::Example<> get(size_t index) override;
  std::optional<size_t> size() const override;
};
using Stacked =
    torch::data::datasets::MapDataset<Rows, torch::data::transforms::Stack<torch::data::Example<>>>;

struct Batch {
  Batch(const torch::data::Example<>& example);
  torch::Tensor data, target;
  operator const torch::Tensor&() const { return data; }
};

torch::Tensor loss_of(const torch::Tensor& outputs, const torch::Tensor& targets = {});
void step(const Batch& batch);
void train(int64_t epoch);

extern Net net;
extern Stacked data, dataset;
extern std::unique_ptr<std::vector<Batch>> loader;  // of this rank's part
extern Batch batch;
extern torch::Tensor inputs, targets;
extern size_t epochs, batch_size;
extern trireme::Context ctx;
extern trireme::DistributedDataParallel<Net> model, ddp;
extern trireme::ZeroRedundancyOptimizer<torch::optim::AdamW> zero;
extern trireme::Sharded<Net> sharded;
extern torch::optim::AdamW optimizer;
