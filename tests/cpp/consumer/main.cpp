// Three steps of DDP and of ZeRO in a foreign project, with whatever group trireme::init() finds:
// alone, or one rank of torchrun --no-python.
#include <trireme/common/version.h>
#include <trireme/trireme.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <iostream>

// Whether ZeRO makes `net` better.
bool learns_sharded(torch::nn::Linear net, const at::Tensor& input) {
  trireme::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      net->parameters(), torch::optim::AdamWOptions(0.01), trireme::ZeroOptions{.stage = 2});
  const auto loss = [&] { return net->forward(input).square().mean(); };
  const double first = loss().item<double>();
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
  }
  return loss().item<double>() < first;
}

// Beside what is used below: trireme.h has all that a program needs.
using trireme::clip_grad_norm_;
using trireme::CustomCommunicator;
using trireme::duplicate;
using trireme::make_shm_group;
using trireme::memory_of;
using trireme::split_contiguous;
using trireme::split_strided;
using trireme::ps::ParameterServer;

int main() {
  trireme::Context ctx = trireme::init();
  torch::manual_seed(0);
  torch::nn::Linear net(8, 2);
  net->to(ctx.device());
  trireme::DistributedDataParallel<torch::nn::Linear> ddp(net);
  torch::optim::SGD optimizer(ddp->parameters(), 0.01);
  const at::Tensor input = torch::ones({4, 8}, ctx.device()) * (1 + ctx.rank());
  double first = 0, last = 0;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = ddp->forward(input).square().mean();
    loss.backward();
    optimizer.step();
    last = trireme::all_mean(*ctx.communicator(), loss.detach()).item<double>();
    if (step == 0) first = last;
  }
  std::cout << "trireme " << trireme::kVersion << ", rank " << ctx.rank() << " of " << ctx.world()
            << ": loss " << first << " -> " << last << "\n";
  torch::nn::Linear sharded(8, 2);
  sharded->to(ctx.device());
  return last < first && learns_sharded(sharded, input) ? 0 : 1;
}
