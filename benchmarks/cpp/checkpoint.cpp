// What checkpoints cost in C++: steps of `mlp` and of `gpt` with every block in a checkpoint,
// beside plain steps that run each block once more by hand. One line of JSON per model with ms per
// round.
//
//   checkpoint ROUNDS [tiny]
//
// The sizes are those of benchmarks/workloads.py.
#include <trireme/activation/checkpoint.h>

#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

using torch::Tensor;

namespace {

enum class Blocks { kOnce, kTwice, kCheckpointed };

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return x + torch::relu(linear(x)); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Layer);

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : attention_norm(register_module("attention_norm", torch::nn::LayerNorm(norm(width)))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        attention_out(register_module("attention_out", torch::nn::Linear(width, width))),
        feed_norm(register_module("feed_norm", torch::nn::LayerNorm(norm(width)))),
        feed_in(register_module("feed_in", torch::nn::Linear(width, 4 * width))),
        feed_out(register_module("feed_out", torch::nn::Linear(4 * width, width))),
        heads(heads) {}

  Tensor forward(const Tensor& input) {
    const int64_t rows = input.size(0), length = input.size(1), width = input.size(2);
    const Tensor parts =
        qkv(attention_norm(input)).view({rows, length, 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                             std::nullopt, 0.0, /*is_causal=*/true);
    const Tensor x = input + attention_out(attended.transpose(1, 2).reshape({rows, length, width}));
    return x + feed_out(torch::gelu(feed_in(feed_norm(x))));
  }

  static torch::nn::LayerNormOptions norm(int64_t width) {
    return torch::nn::LayerNormOptions({width});
  }

  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear qkv, attention_out;
  torch::nn::LayerNorm feed_norm;
  torch::nn::Linear feed_in, feed_out;
  int64_t heads;
};
TORCH_MODULE(Block);

template <typename Layers>
Tensor run(Layers& layers, Tensor x, Blocks blocks) {
  for (auto& layer : layers) {
    if (blocks == Blocks::kTwice) layer(x);
    x = blocks == Blocks::kCheckpointed ? trireme::checkpoint(layer, x) : layer(x);
  }
  return x;
}

// Runs all sides once per round, every other round in reversed order, and prints their ms.
void measure(const char* name, int rounds, const std::function<void(Blocks)>& step) {
  const std::vector<Blocks> sides{Blocks::kOnce, Blocks::kTwice, Blocks::kCheckpointed};
  std::vector<std::string> lists(sides.size());
  for (int round = -2; round < rounds; ++round) {
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t side = round % 2 == 0 ? i : sides.size() - 1 - i;
      const auto begin = std::chrono::steady_clock::now();
      step(sides[side]);
      const std::chrono::duration<double, std::milli> taken =
          std::chrono::steady_clock::now() - begin;
      if (round < 0) continue;  // warm-up
      lists[side] += (lists[side].empty() ? "" : ", ") + std::to_string(taken.count());
    }
  }
  std::printf("{\"model\": \"%s\", \"once\": [%s], \"twice\": [%s], \"checkpointed\": [%s]}\n",
              name, lists[0].c_str(), lists[1].c_str(), lists[2].c_str());
  std::fflush(stdout);
}

template <typename Layers>
void zero_grad(Layers& layers) {
  for (auto& layer : layers) layer->zero_grad();
}

void measure_mlp(int rounds, bool tiny) {
  const int64_t width = tiny ? 32 : 1024;
  std::vector<Layer> layers;
  for (int i = 0; i < (tiny ? 2 : 16); ++i) layers.emplace_back(width);
  const Tensor x = torch::randn({16, width});
  measure("mlp", rounds, [&](Blocks blocks) {
    zero_grad(layers);
    run(layers, x, blocks).square().mean().backward();
  });
}

void measure_gpt(int rounds, bool tiny) {
  const int64_t width = tiny ? 32 : 384, length = tiny ? 32 : 128, words = 128;
  torch::nn::Embedding tokens(words, width);
  torch::nn::Linear head(width, words);
  std::vector<Block> layers;
  for (int i = 0; i < (tiny ? 2 : 8); ++i) layers.emplace_back(width, tiny ? 2 : 6);
  const Tensor text = torch::randint(words, {8, length});
  measure("gpt", rounds, [&](Blocks blocks) {
    zero_grad(layers);
    tokens->zero_grad();
    head->zero_grad();
    const Tensor logits = head(run(layers, tokens(text), blocks));
    torch::nn::functional::cross_entropy(logits.flatten(0, 1), text.flatten()).backward();
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s ROUNDS [tiny]\n", argv[0]);
    return 2;
  }
  const int rounds = std::atoi(argv[1]);
  const bool tiny = argc > 2 && std::string(argv[2]) == "tiny";
  torch::manual_seed(0);
  measure_mlp(rounds, tiny);
  measure_gpt(rounds, tiny);
  return 0;
}
