// Trains a transformer on characters in a pipeline that gets shorter as its layers freeze.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_pipetransformer TEXT
//
// Behind the text may stand the steps of an epoch and the number of epochs. The first run has all
// parts of PipeTransformer. At the end of each epoch it prints the loss, how many of the eight
// layers were frozen, and the plan: ranks per pipeline x replicas. Then comes the ablation: the
// same batches and the same freeze schedule without some of the parts, and under plain
// DistributedDataParallel. Sides that freeze reach the same loss, and so do those that do not.
// examples/python/train_pipetransformer.py is the same program in Python and reaches the same
// losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

constexpr int64_t kLength = 64;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 32;  // of all ranks together, as kChunks
constexpr int64_t kChunks = 8;
constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kBlocks = 8;

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

// The embedding and the first block are frozen together.
struct FirstImpl : torch::nn::Module {
  FirstImpl(Embed embed_first, Block block_behind)
      : embed(register_module("0", std::move(embed_first))),
        block(register_module("1", std::move(block_behind))) {}
  torch::Tensor forward(const torch::Tensor& text) { return block(embed(text)); }
  Embed embed;
  Block block;
};
TORCH_MODULE(First);

struct LastImpl : torch::nn::Module {
  LastImpl(Block block_in_front, torch::nn::Linear scores)
      : block(register_module("0", std::move(block_in_front))),
        head(register_module("1", std::move(scores))) {}
  torch::Tensor forward(const torch::Tensor& input) { return head(block(input)); }
  Block block;
  torch::nn::Linear head;
};
TORCH_MODULE(Last);

// What is frozen and moved at a time, the same on every rank.
torch::nn::Sequential make_layers(torch::Device device) {
  torch::manual_seed(0);
  Embed embed;
  std::vector<Block> blocks;
  for (int64_t i = 0; i < kBlocks; ++i) blocks.emplace_back();
  torch::nn::Linear head(kWidth, kCharacters);
  torch::nn::Sequential layers;
  layers->push_back(First(embed, blocks.front()));
  for (size_t i = 1; i + 1 < blocks.size(); ++i) layers->push_back(blocks[i]);
  layers->push_back(Last(blocks.back(), head));
  layers->to(device);
  return layers;
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), next.flatten());
}

// Windows of a text, in another order in each epoch.
class Data {
 public:
  Data(const char* path, int64_t steps, torch::Device device)
      : steps_(steps),
        samples_(steps * kBatch),
        rows_(read(path, samples_).to(device)),
        batches_({.rows = samples_, .size = kBatch}) {}

  int64_t steps() const { return steps_; }
  torch::Tensor ids(int64_t epoch, int64_t step) { return batches_.whole(epoch * steps_ + step); }
  torch::Tensor inputs(const torch::Tensor& ids) const { return of(ids).narrow(1, 0, kLength); }
  torch::Tensor targets(const torch::Tensor& ids) const { return of(ids).narrow(1, 1, kLength); }

  std::shared_ptr<trireme::ActivationCache> make_cache(const trireme::Context& ctx) const {
    const int64_t row = kLength * kWidth * 4;
    return std::make_shared<trireme::ActivationCache>(samples_, samples_ * (row + 64) + 4096,
                                                      ctx.communicator());
  }

 private:
  torch::Tensor of(const torch::Tensor& ids) const {
    return rows_.index_select(0, ids.to(rows_.device()));
  }

  static torch::Tensor read(const char* path, int64_t samples) {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
    TORCH_CHECK(text.size() > static_cast<size_t>(kLength + 1), "[train_pipetransformer] got '",
                path, "' with ", text.size(), " characters, expected a text of more than ",
                kLength + 1, ". Name another file.");
    const torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                                 {static_cast<int64_t>(text.size())}, torch::kByte);
    const torch::Tensor windows =
        bytes.to(torch::kLong).clamp_max(kCharacters - 1).unfold(0, kLength + 1, 1);
    return windows.index_select(0, torch::arange(samples) * 7 % windows.size(0));
  }

  int64_t steps_;
  int64_t samples_;
  torch::Tensor rows_;
  trireme::GlobalBatch batches_;
};

const trireme::FreezeOptions kSchedule{.alpha = 1.0 / 3, .rule = "schedule"};

// One side of the ablation.
struct Side {
  bool freezes = false;
  bool has_cache = false;
  bool is_elastic = false;  // whether pipelines shrink and multiply
  bool tells = false;
};

// Trains by PipeTransformer; returns the mean loss of the last epoch.
double train_elastic(Data& data, int64_t epochs, const trireme::Context& ctx, const Side& side) {
  torch::nn::Sequential layers = make_layers(ctx.device());
  torch::optim::AdamW optimizer(layers->parameters(), torch::optim::AdamWOptions(1e-3));
  trireme::PipeTransformerOptions options;
  options.global_batch = kBatch;
  options.chunks = kChunks;
  options.freeze.reset();
  if (side.freezes) options.freeze = kSchedule;
  options.pipe = options.replicas = side.is_elastic;
  if (side.has_cache) options.cache = data.make_cache(ctx);
  trireme::PipeTransformer<> run(layers, loss_of, optimizer, options);
  double mean = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    double total = 0;
    for (int64_t step = 0; step < data.steps(); ++step) {
      const torch::Tensor ids = data.ids(epoch, step);
      total += run->step(data.inputs(ids), ids, data.targets(ids)).item<double>();
    }
    mean = total / static_cast<double>(data.steps());
    const trireme::ElasticEpoch& was = run->end_epoch();
    if (side.tells && ctx.rank() == 0)
      std::printf("epoch %ld  loss %.6f  frozen %ld  plan %ld x %ld  hits %ld\n",
                  static_cast<long>(epoch), mean, static_cast<long>(was.frozen),
                  static_cast<long>(was.ranks_per_pipeline), static_cast<long>(was.replicas),
                  static_cast<long>(was.hits));
  }
  return mean;
}

// Layers behind those whose outputs are given.
struct RestImpl : torch::nn::Module {
  explicit RestImpl(torch::nn::Sequential all)
      : layers(register_module("layers", std::move(all))) {}
  torch::Tensor forward(const torch::Tensor& input, int64_t first) {
    return trireme::run_layers(layers, first, static_cast<int64_t>(layers->size()), input);
  }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Rest);

// Trains by DistributedDataParallel; returns the mean loss of the last epoch.
double train_ddp(Data& data, int64_t epochs, const trireme::Context& ctx, const Side& side) {
  torch::nn::Sequential layers = make_layers(ctx.device());
  Rest rest(layers);
  trireme::DistributedDataParallel<Rest> ddp(rest);
  torch::optim::AdamW optimizer(layers->parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<trireme::FreezeLayer> names;
  for (size_t i = 0; i < layers->size(); ++i) names.emplace_back("layers." + std::to_string(i));
  std::optional<trireme::Freeze> freeze;
  if (side.freezes) freeze.emplace(ddp, names, kSchedule, &optimizer);
  const auto cache = side.has_cache ? data.make_cache(ctx) : nullptr;
  trireme::CachedPrefix prefix{nullptr};
  const int64_t share = kBatch / ctx.world();
  double mean = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    double total = 0;
    for (int64_t step = 0; step < data.steps(); ++step) {
      const torch::Tensor ids = data.ids(epoch, step).narrow(0, ctx.rank() * share, share);
      const bool is_cached = !prefix.is_empty();
      const torch::Tensor input = data.inputs(ids);
      optimizer.zero_grad();
      const torch::Tensor scores = is_cached
                                       ? ddp->forward(prefix->forward(input, ids), freeze->frozen())
                                       : ddp->forward(input, int64_t{0});
      const torch::Tensor loss = loss_of(scores, data.targets(ids));
      loss.backward();
      if (freeze) freeze->step();
      optimizer.step();
      total += trireme::all_mean(*ctx.communicator(), loss.detach()).item<double>();
    }
    mean = total / static_cast<double>(data.steps());
    if (!freeze || freeze->advance() == 0 || !cache) continue;
    torch::nn::Sequential front;
    for (int64_t i = 0; i < freeze->frozen(); ++i) front->push_back(*(layers->begin() + i));
    prefix = trireme::CachedPrefix(front, cache);
  }
  return mean;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [EPOCHS]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 16;
  const int64_t epochs = argc > 3 ? std::atoll(argv[3]) : 6;
  trireme::Context ctx = trireme::init();
  Data data(argv[1], steps, ctx.device());
  train_elastic(data, epochs, ctx, {true, true, true, /*tells=*/true});

  using Train = double (*)(Data&, int64_t, const trireme::Context&, const Side&);
  struct Row {
    const char* name;
    Train train;
    Side side;
  };
  const std::vector<Row> rows = {{"DDP", train_ddp, {}},
                                 {"DDP + Freeze", train_ddp, {true}},
                                 {"DDP + Freeze + cache", train_ddp, {true, true}},
                                 {"fixed pipeline", train_elastic, {}},
                                 {"+ Freeze", train_elastic, {true}},
                                 {"+ plan and transform", train_elastic, {true, false, true}},
                                 {"all", train_elastic, {true, true, true}}};
  for (const Row& row : rows) {
    const auto begin = std::chrono::steady_clock::now();
    const double loss = row.train(data, epochs, ctx, row.side);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (ctx.rank() == 0)
      std::printf("%-21s last loss %.6f  %5.1f s\n", row.name, loss, taken.count());
  }
  return 0;
}
