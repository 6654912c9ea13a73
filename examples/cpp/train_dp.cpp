// The model and data of train_ddp.cpp in one process: replicas of the model work on their parts of
// each batch at the same time. No launcher, no ranks:
//
//   build/current/examples/cpp/train_dp README.md
//
// The two lines marked DP are all that a plain LibTorch loop has to change, besides the base class
// of its model, which must be one that can be cloned. It reaches the losses of train_ddp.

#include <trireme/trireme.h>  // DP 1

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

constexpr int64_t kContext = 32;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 64;

struct NextCharacterImpl : torch::nn::Cloneable<NextCharacterImpl> {
  NextCharacterImpl() { reset(); }

  void reset() override {
    embed = register_module("embed", torch::nn::Embedding(kCharacters, 32));
    hidden = register_module("hidden", torch::nn::Linear(32 * kContext, 256));
    out = register_module("out", torch::nn::Linear(256, kCharacters));
  }

  torch::Tensor forward(const torch::Tensor& characters) {
    return out(torch::relu(hidden(embed(characters).flatten(1))));
  }

  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(NextCharacter);

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_dp] got '", path, "' with ",
              text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [REPLICAS]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  trireme::DataParallelOptions options;
  options.replicas = argc > 3 ? std::atoll(argv[3]) : 0;  // 0 takes as many as suit the machine
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  trireme::DataParallel<NextCharacter> model(net, options);  // DP 2
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kBatch * 7;
    const torch::Tensor rows = torch::arange(first, first + kBatch * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows);
    const torch::Tensor scores = model->forward(batch.narrow(1, 0, kContext));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(scores, batch.select(1, kContext));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 20 == 0 || step == steps - 1)
      std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), loss.item<double>());
  }
  return 0;
}
