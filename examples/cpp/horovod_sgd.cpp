// Learns drawn digits with Horovod's API for C++: the model, data and losses of
// examples/python/horovod_digits.py.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/horovod_sgd

#include <trireme/horovod.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

namespace hvd = trireme::horovod;

constexpr int64_t kBatch = 64;  // of all ranks together
constexpr const char* kSegments[] = {"1110111", "0010010", "1011101", "1011011", "0111010",
                                     "1101011", "1101111", "1010010", "1111111", "1111011"};

// Returns which of seven strokes each digit has.
torch::Tensor strokes(const torch::Tensor& digits) {
  torch::Tensor table = torch::empty({10, 7});
  for (int64_t digit = 0; digit < 10; ++digit)
    for (int64_t i = 0; i < 7; ++i) table[digit][i] = kSegments[digit][i] == '1' ? 1.0 : 0.0;
  return table.index_select(0, digits);
}

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100;
  hvd::init();
  torch::manual_seed(static_cast<uint64_t>(hvd::rank()));  // another model on each rank
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(7, 32));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(32, 10));
  {
    hvd::DistributedOptimizer<torch::optim::SGD> optimizer(
        net, torch::optim::SGDOptions(0.1).momentum(0.9));
    hvd::broadcast_parameters(net);  // until rank 0's comes

    torch::manual_seed(0);  // the same data on each rank, of which it takes its part
    for (int64_t step = 0; step < steps; ++step) {
      const torch::Tensor digits = torch::arange(kBatch) % 10;
      const torch::Tensor drawn = strokes(digits) + 0.3 * torch::randn({kBatch, 7});
      const auto rows = torch::indexing::Slice(hvd::rank(), torch::indexing::None, hvd::size());
      const torch::Tensor scores = net->forward(drawn.index({rows}));
      const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, digits.index({rows}));
      optimizer.zero_grad();
      loss.backward();
      optimizer.synchronize();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      {
        const auto skip = optimizer.skip_synchronize();
        optimizer.step();
      }
      if (step % 20 == 0 || step == steps - 1) {
        const double mean = hvd::allreduce(loss, {.name = "loss"}).item<double>();
        if (hvd::rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
      }
    }
  }
  hvd::shutdown();
  return 0;
}
