// A transformer on characters whose blocks run again in backward and keep nothing until then.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_checkpointed README.md
//
// The line marked CHECKPOINT is all that a plain model has to change; with `never` behind the
// number of steps it is left out. Losses are equal with and without it, bit for bit, though the
// blocks draw random numbers (dropout). At the end it prints the memory that training took on top.
// examples/python/train_checkpointed.py is the same program in Python and reaches the same losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

constexpr int64_t kLength = 64;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 32;  // all ranks share it
constexpr int64_t kWidth = 128;
constexpr int64_t kHeads = 4;
constexpr int64_t kBlocks = 6;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : attention_norm(register_module("attention_norm", norm())),
        qkv(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        attention_out(register_module("attention_out", torch::nn::Linear(kWidth, kWidth))),
        feed_norm(register_module("feed_norm", norm())),
        feed_in(register_module("feed_in", torch::nn::Linear(kWidth, 4 * kWidth))),
        feed_out(register_module("feed_out", torch::nn::Linear(4 * kWidth, kWidth))) {}

  torch::Tensor forward(const torch::Tensor& input) {
    const int64_t rows = input.size(0);
    const torch::Tensor split =
        qkv(attention_norm(input)).view({rows, kLength, 3, kHeads, kWidth / kHeads});
    const std::vector<torch::Tensor> parts = split.permute({2, 0, 3, 1, 4}).unbind(0);
    const torch::Tensor attended =
        torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                            /*is_causal=*/true)
            .transpose(1, 2)
            .reshape({rows, kLength, kWidth});
    const torch::Tensor x = input + torch::dropout(attention_out(attended), 0.1, true);
    return x + torch::dropout(feed_out(torch::gelu(feed_in(feed_norm(x)))), 0.1, true);
  }

  static torch::nn::LayerNorm norm() { return torch::nn::LayerNorm(std::vector<int64_t>{kWidth}); }

  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear qkv, attention_out;
  torch::nn::LayerNorm feed_norm;
  torch::nn::Linear feed_in, feed_out;
};
TORCH_MODULE(Block);

struct NextCharacterImpl : torch::nn::Module {
  explicit NextCharacterImpl(bool checkpointed)
      : checkpointed(checkpointed),
        embed(register_module("embed", torch::nn::Embedding(kCharacters, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kLength, kWidth))) {
    for (int64_t i = 0; i < kBlocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    out = register_module("out", torch::nn::Linear(kWidth, kCharacters));
  }

  torch::Tensor forward(const torch::Tensor& characters) {
    torch::Tensor x = embed(characters) + positions->weight;
    for (Block& block : blocks)
      x = checkpointed ? trireme::checkpoint(block, x) : block(x);  // CHECKPOINT
    return out(x);
  }

  bool checkpointed;
  torch::nn::Embedding embed, positions;
  std::vector<Block> blocks;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(NextCharacter);

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kLength + 1), "[train_checkpointed] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kLength + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

// Returns the most memory that this process ever had.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  std::string word;
  double kib = 0;
  while (status >> word) {
    if (word == "VmHWM:") status >> kib;
  }
  return kib / 1024;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [never]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  const std::string how = argc > 3 ? argv[3] : "always";
  trireme::Context ctx = trireme::init();
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kLength + 1, 1);

  torch::manual_seed(0);
  NextCharacter net(how != "never");
  net->to(ctx.device());
  auto model = trireme::fully_shard(net);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(static_cast<uint64_t>(1 + ctx.rank()));  // each rank has a dropout of its own

  const double before = peak_mib();
  const int64_t share = kBatch / ctx.world();
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = (step * kBatch + ctx.rank() * share) * 7;
    const torch::Tensor rows = torch::arange(first, first + share * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    const torch::Tensor scores = model->forward(batch.narrow(1, 0, kLength));
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        scores.flatten(0, 1), batch.narrow(1, 1, kLength).flatten());
    optimizer.zero_grad();
    loss.backward();
    trireme::step(optimizer);
    if (step % 10 == 0 || step == steps - 1) {
      const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
      if (ctx.rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  if (ctx.rank() == 0)
    std::printf("checkpointed: %s, peak %.0f MiB\n", how.c_str(), peak_mib() - before);
  return 0;
}
