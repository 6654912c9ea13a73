// BatchNorm over the batch of all ranks: a small image model whose statistics, and so its losses,
// do not depend on the number of ranks.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/sync_batch_norm

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  trireme::Context ctx = trireme::init();
  torch::manual_seed(0);
  torch::nn::Sequential net(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).bias(false)),
      // In place of torch::nn::BatchNorm2d(8); parameters and buffers have its names.
      trireme::SyncBatchNorm(trireme::SyncBatchNormOptions(8), ctx.communicator()),
      torch::nn::ReLU(), torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(),
      torch::nn::Linear(8, 4));
  net->to(ctx.device());
  trireme::DistributedDataParallel<torch::nn::Sequential> model(net);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));

  // Images with a bright quarter, which is to be named: 24 of all ranks together.
  const torch::Tensor targets = torch::arange(24) % 4;
  torch::Tensor images = torch::randn({24, 1, 12, 12});
  for (int64_t i = 0; i < 24; ++i)
    images[i][0].slice(0, i % 4 / 2 * 6, i % 4 / 2 * 6 + 6).slice(1, i % 2 * 6, i % 2 * 6 + 6) *= 3;
  const auto part = [&](const torch::Tensor& all) {
    return all.chunk(ctx.world())[ctx.rank()].to(ctx.device());
  };
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(model->forward(part(images)), part(targets));
    loss.backward();
    optimizer.step();
    const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
    if (ctx.rank() == 0 && step % 5 == 4) std::printf("step %2d  loss %.6f\n", step + 1, mean);
  }
  // In evaluation the running statistics are used, and nothing is communicated.
  model->eval();
  const torch::NoGradGuard no_grad;
  const torch::Tensor right =
      (model->forward(part(images)).argmax(1) == part(targets)).to(torch::kFloat).mean();
  const double mean = trireme::all_mean(*ctx.communicator(), right).item<double>();
  if (ctx.rank() == 0) std::printf("right: %.0f %%\n", 100 * mean);
  return 0;
}
