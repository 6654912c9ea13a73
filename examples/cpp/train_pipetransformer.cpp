// A transformer on characters, first in a pipeline over all ranks. As its layers freeze from the
// input on, the pipeline shrinks, replicas of it take the ranks set free, and what frozen layers
// return is kept for each sample.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_pipetransformer
//   README.md
//
// The lines marked ELASTIC are all that a plain program has to change. It prints each epoch: the
// loss of its last step, how many of the eight layers are frozen, and the plan. Behind the number
// of epochs "ablation" trains again without the parts, one after the other, and prints what the
// last epoch took. examples/python/train_pipetransformer.py is the same program in Python and
// reaches the same losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

constexpr int64_t kLength = 64;
constexpr int64_t kCharacters = 128;
constexpr int64_t kSamples = 256;
constexpr int64_t kBatch = 32;  // on all ranks together
constexpr int64_t kChunks = 8;
constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kBlocks = 6;
constexpr int64_t kCacheBytes = kSamples * (kLength * kWidth * 4 + 1024);

struct EmbedImpl : torch::nn::Module {
  EmbedImpl()
      : characters(register_module("characters", torch::nn::Embedding(kCharacters, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kLength, kWidth))) {}

  torch::Tensor forward(const torch::Tensor& text) { return characters(text) + positions->weight; }

  torch::nn::Embedding characters, positions;
};
TORCH_MODULE(Embed);

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

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), next.flatten());
}

torch::Tensor read_samples(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kLength + 1), "[train_pipetransformer] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kLength + 1,
              ". Name another file.");
  const torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                               {static_cast<int64_t>(text.size())}, torch::kByte);
  const torch::Tensor windows =
      bytes.to(torch::kLong).clamp_max(kCharacters - 1).unfold(0, kLength + 1, 1);
  return windows.index_select(0, torch::arange(0, kSamples * 7, 7) % windows.size(0));
}

// Which parts of PipeTransformer a run has.
struct Parts {
  const char* name;
  bool freeze = true;
  bool pipe = true;
  bool cache = true;
};

// Trains from the beginning. Returns the last epoch, and the loss of its last step.
std::pair<trireme::ElasticEpoch, double> train(trireme::Context& ctx, const torch::Tensor& samples,
                                               int64_t epochs, const Parts& parts, bool prints) {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  net->push_back(Embed());
  for (int64_t i = 0; i < kBlocks; ++i) net->push_back(Block());
  net->push_back(torch::nn::Linear(kWidth, kCharacters));
  net->to(ctx.device());
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));

  trireme::PipeTransformerOptions options;  // ELASTIC, from here
  options.global_batch = kBatch;
  options.chunks = kChunks;
  options.freeze = trireme::FreezeOptions{.rule = "schedule"};
  if (!parts.freeze) options.freeze.reset();
  options.pipe = options.replicas = parts.pipe;
  if (parts.cache)
    options.cache =
        std::make_shared<trireme::ActivationCache>(kSamples, kCacheBytes, ctx.communicator());
  options.costs.assign(net->size(), 1.0);                            // left out, they are measured
  trireme::PipeTransformer<> run(net, loss_of, optimizer, options);  // ELASTIC, to here

  trireme::GlobalBatch batches({.rows = kSamples, .size = kBatch});
  double loss = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t step = 0; step < kSamples / kBatch; ++step) {
      const torch::Tensor ids = batches.whole(epoch * (kSamples / kBatch) + step);
      const torch::Tensor batch = samples.index_select(0, ids).to(ctx.device());
      loss = run->step(batch.narrow(1, 0, kLength).contiguous(), ids,  // ELASTIC
                       batch.narrow(1, 1, kLength).contiguous())
                 .item<double>();
    }
    const trireme::ElasticEpoch& was = run->end_epoch();  // ELASTIC
    if (prints)
      std::printf("epoch %ld  loss %.6f  frozen %ld  plan %ld x %ld\n", static_cast<long>(epoch),
                  loss, static_cast<long>(was.frozen), static_cast<long>(was.ranks_per_pipeline),
                  static_cast<long>(was.replicas));
  }
  return {run->history().back(), loss};
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [EPOCHS [ablation]]\n", argv[0]);
    return 2;
  }
  const int64_t epochs = argc > 2 ? std::atoll(argv[2]) : 6;
  const bool has_ablation = argc > 3 && std::strcmp(argv[3], "ablation") == 0;
  trireme::Context ctx = trireme::init();
  const torch::Tensor samples = read_samples(argv[1]);
  const bool is_first = ctx.rank() == 0;
  std::vector<Parts> rows{{"all"}};
  if (has_ablation)
    rows.insert(rows.end(), {{"without the cache", true, true, false},
                             {"a fixed pipeline, freezing", true, false, false},
                             {"a fixed pipeline", false, false, false}});
  for (const Parts& parts : rows) {
    const auto [last, loss] =
        train(ctx, samples, epochs, parts, is_first && parts.name == rows[0].name);
    if (is_first && has_ablation)
      std::printf("%-28s loss %.6f  last epoch %.3f s\n", parts.name, loss, last.seconds);
  }
  return 0;
}
