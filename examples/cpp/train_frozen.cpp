// A transformer on characters whose layers are frozen from the input on while it trains.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_frozen README.md
//
// The lines marked FREEZE are all that a plain program has to change. Behind the number of steps
// stands the rule: "gradient", "schedule" or "never". An interval, behind which layers are frozen,
// is an eighth of the steps. At the end of each it prints the loss, how many of the six layers are
// frozen and how many bytes of gradients the last step has averaged.
// examples/python/train_frozen.py is the same program in Python and reaches the same losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

constexpr int64_t kLength = 64;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 32;  // all ranks share it
constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kBlocks = 6;
constexpr int64_t kIntervals = 8;

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
    const torch::Tensor x = input + attention_out(attended);
    return x + feed_out(torch::gelu(feed_in(feed_norm(x))));
  }

  static torch::nn::LayerNorm norm() { return torch::nn::LayerNorm(std::vector<int64_t>{kWidth}); }

  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear qkv, attention_out;
  torch::nn::LayerNorm feed_norm;
  torch::nn::Linear feed_in, feed_out;
};
TORCH_MODULE(Block);

struct NextCharacterImpl : torch::nn::Module {
  NextCharacterImpl()
      : embed(register_module("embed", torch::nn::Embedding(kCharacters, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kLength, kWidth))) {
    for (int64_t i = 0; i < kBlocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    out = register_module("out", torch::nn::Linear(kWidth, kCharacters));
  }

  torch::Tensor forward(const torch::Tensor& characters) {
    torch::Tensor x = embed(characters) + positions->weight;
    for (Block& block : blocks) x = block(x);
    return out(x);
  }

  torch::nn::Embedding embed, positions;
  std::vector<Block> blocks;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(NextCharacter);

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kLength + 1), "[train_frozen] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kLength + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [gradient|schedule|never]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 160;
  const std::string rule = argc > 3 ? argv[3] : "gradient";
  trireme::Context ctx = trireme::init();
  const torch::Tensor windows = read_text(argv[1]).unfold(0, kLength + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  net->to(ctx.device());
  trireme::DistributedDataParallel<NextCharacter> ddp(net);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<trireme::FreezeLayer> layers{{"embed", "positions", "block0"}};
  for (int64_t i = 1; i < kBlocks; ++i) layers.emplace_back("block" + std::to_string(i));
  std::optional<trireme::Freeze> freeze;
  if (rule != "never")
    freeze.emplace(ddp, layers, trireme::FreezeOptions{.rule = rule}, &optimizer);  // FREEZE

  const int64_t share = kBatch / ctx.world();
  const int64_t every = std::max<int64_t>(1, steps / kIntervals);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t begin = (step * kBatch + ctx.rank() * share) * 7;
    const torch::Tensor rows = torch::arange(begin, begin + share * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    const torch::Tensor scores = ddp->forward(batch.narrow(1, 0, kLength));
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        scores.flatten(0, 1), batch.narrow(1, 1, kLength).flatten());
    optimizer.zero_grad();
    loss.backward();
    if (freeze) freeze->step();  // FREEZE
    optimizer.step();
    if (step % every != every - 1) continue;
    const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
    const int64_t frozen = freeze ? freeze->frozen() : 0;
    if (ctx.rank() == 0)
      std::printf("step %3ld  loss %.6f  frozen %ld  bytes %ld\n", static_cast<long>(step), mean,
                  static_cast<long>(frozen), static_cast<long>(ddp->last_step().reduced_bytes));
    if (freeze) freeze->advance();  // FREEZE
  }
  return 0;
}
