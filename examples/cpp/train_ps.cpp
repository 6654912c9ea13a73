// Trains the model of train_ddp.cpp with a parameter server, under any of its modes.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_ps README.md 100 ssp
//
// The lines marked PS are all that a plain LibTorch loop has to change.
// examples/python/ps_train.py is the same program in Python and reaches the same loss under bsp.

#include <trireme/trireme.h>  // PS 1

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace ps = trireme::ps;

constexpr int64_t kContext = 32;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 64;  // rows of all workers together

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_ps] got '", path, "' with ",
              text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

ps::Mode mode_of(const std::string& name) {
  TORCH_CHECK(name == "bsp" || name == "ssp" || name == "async", "[train_ps] got mode '", name,
              "', expected bsp, ssp or async. Name one of them.");
  return name == "bsp" ? ps::Mode::kBsp : name == "ssp" ? ps::Mode::kSsp : ps::Mode::kAsync;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [MODE]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  const ps::Mode mode = mode_of(argc > 3 ? argv[3] : "bsp");
  trireme::InitOptions on_cpu;  // its tables lie in the memory of the host
  on_cpu.device = torch::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);  // PS 2
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Embedding(kCharacters, 32));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(32 * kContext, 256));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(256, kCharacters));
  // Each push is a step of its own under ssp and async, as many as there are workers in a clock.
  const double lr = mode == ps::Mode::kBsp ? 3e-3 : 3e-3 / static_cast<double>(ctx.world());
  ps::Options options;
  options.mode = mode;
  options.staleness = mode == ps::Mode::kSsp ? 2 : 0;
  ps::ParameterServer server(ctx, {ps::dense("net", net, ps::AdamW{.lr = lr})}, options);  // PS 3
  ps::DenseTable& table = server.dense("net");

  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kBatch * 7;
    const torch::Tensor rows = torch::arange(first, first + kBatch * 7, 7) % windows.size(0);
    const torch::Tensor own =
        rows.slice(0, ctx.rank(), torch::indexing::None, ctx.world());  // every so many
    const torch::Tensor batch = windows.index_select(0, own);
    table.pull();  // PS 4
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        net->forward(batch.narrow(1, 0, kContext)), batch.select(1, kContext));
    loss.backward();
    table.push();  // PS 5
    server.clock();
    if (step % 20 == 0 || step == steps - 1) {
      const auto mean = trireme::all_mean(*ctx.communicator(), loss.detach()).item<double>();
      if (ctx.rank() == 0)  // PS 6
        std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  return 0;
}
