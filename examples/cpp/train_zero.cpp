// The model and data of train_ddp.cpp, trained with ZeRO stage 2: the ranks of a host hold one copy
// of the parameters, and each rank its part of the gradients and of the optimizer's state.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_zero README.md
//
// The four lines marked ZeRO are all that a plain LibTorch loop has to change, besides giving each
// rank its part of the data. It reaches the losses of train_ddp.

#include <trireme/trireme.h>  // ZeRO 1

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

constexpr int64_t kContext = 32;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 64;  // all ranks share it

struct NextCharacterImpl : torch::nn::Module {
  NextCharacterImpl()
      : embed(register_module("embed", torch::nn::Embedding(kCharacters, 32))),
        hidden(register_module("hidden", torch::nn::Linear(32 * kContext, 256))),
        out(register_module("out", torch::nn::Linear(256, kCharacters))) {}

  torch::Tensor forward(const torch::Tensor& characters) {
    return out(torch::relu(hidden(embed(characters).flatten(1))));
  }

  torch::nn::Embedding embed;
  torch::nn::Linear hidden, out;
};
TORCH_MODULE(NextCharacter);

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_zero] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [OPTIMIZER_FILE]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  trireme::Context ctx = trireme::init();  // ZeRO 2
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  net->to(ctx.device());
  trireme::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(  // ZeRO 3
      net, torch::optim::AdamWOptions(3e-3), trireme::ZeroOptions{.stage = 2});

  const int64_t share = kBatch / ctx.world();
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = (step * kBatch + ctx.rank() * share) * 7;
    const torch::Tensor rows = torch::arange(first, first + share * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    const torch::Tensor scores = net->forward(batch.narrow(1, 0, kContext));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(scores, batch.select(1, kContext));
    optimizer.zero_grad();
    loss.backward();
    optimizer.clip_grad_norm_(100);  // ZeRO 4: no rank has all gradients
    optimizer.step();
    if (step % 20 == 0 || step == steps - 1) {
      const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
      if (ctx.rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  if (argc > 3) {
    optimizer.consolidate();  // collective; rank 0 then has the state of all
    if (ctx.rank() == 0) torch::save(optimizer, argv[3]);
  }
  return 0;
}
