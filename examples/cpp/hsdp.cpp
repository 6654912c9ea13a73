// Hybrid sharding: parameters are sharded over groups of 2 neighbouring ranks, each of which holds
// a whole replica, and gradients are averaged over all. Where ranks are spread over several hosts,
// let a group be a host: then only gradients cross the network.
//
//   torchrun --no-python --nproc-per-node 4 build/current/examples/cpp/hsdp

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>

// Each block is a unit of its own: where parameters are gathered, one block is there at a time.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const trireme::FsdpOptions& options)
      : inside(
            register_module("inside", trireme::fully_shard(torch::nn::Linear(32, 32), options))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::tanh(inside->forward(x)); }
  trireme::Sharded<torch::nn::Linear> inside;
};
TORCH_MODULE(Block);

int main() {
  trireme::Context ctx = trireme::init({.device = torch::kCPU});
  const trireme::FsdpOptions options{.shard_among = ctx.world() % 2 == 0 ? 2 : 1};
  torch::manual_seed(0);
  torch::nn::Sequential net(Block{options}, Block{options}, torch::nn::Linear(32, 1));
  auto model = trireme::fully_shard(net, options);
  trireme::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));

  const torch::Tensor inputs = torch::randn({48, 32});
  const torch::Tensor targets = inputs.narrow(1, 0, 4).sum(1, true).sin();
  const auto part = [&](const torch::Tensor& all) { return all.chunk(ctx.world())[ctx.rank()]; };
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(part(inputs)), part(targets));
    loss.backward();
    model->clip_grad_norm_(1.0);
    optimizer.step();
    const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
    if (ctx.rank() == 0 && step % 10 == 9) std::printf("step %2d  loss %.6f\n", step + 1, mean);
  }
  int64_t held = 0;
  for (const torch::Tensor& shard : model->parameters()) held += shard.numel();
  if (ctx.rank() == 0) std::printf("rank 0 trains %ld elements\n", static_cast<long>(held));
  return 0;
}
