// The model and data of train_ddp.cpp where the link between workers is slow: they average now and
// then, in fragments that travel while training goes on.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_slow_link README.md
//   100
//   ... train_slow_link README.md 100 --method sparse
//
// Methods are diloco (the default), sparse (SparseLoCo: codes of the largest values) and local_sgd.
// The lines marked ROUNDS are all that a program for one process has to change. Each rank is a
// worker.
//
// examples/python/train_slow_link.py is the same program in Python and reaches the same losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
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

torch::Tensor read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_slow_link] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

struct Arguments {
  std::string text, method = "diloco";
  int64_t steps = 100;
};

std::optional<Arguments> parse(int argc, char** argv) {
  Arguments args;
  int positional = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--method" && i + 1 < argc) {
      args.method = argv[++i];
    } else if (word.rfind("--", 0) == 0 || ++positional > 2) {
      return std::nullopt;
    } else if (positional == 1) {
      args.text = word;
    } else {
      args.steps = std::atoll(word.c_str());
    }
  }
  return positional > 0 ? std::optional(args) : std::nullopt;
}

// The rounds, and the outer optimizer that they step.
struct Method {
  std::unique_ptr<torch::optim::Optimizer> outer = nullptr;
  std::unique_ptr<trireme::ModuleRounds> rounds = nullptr;
};

Method make_rounds(const std::string& method, NextCharacter& net,
                   torch::optim::Optimizer& optimizer, const trireme::Context& ctx) {
  const auto across = ctx.communicator();
  Method made;
  if (method == "local_sgd") {
    const trireme::LocalSGDOptions options{.sync_every = 20, .across = across};
    made.rounds = std::make_unique<trireme::LocalSGD>(*net, optimizer, options);
    return made;
  }
  TORCH_CHECK(method == "diloco" || method == "sparse", "[train_slow_link] got --method ", method,
              ", expected diloco, sparse or local_sgd. Leave it out for diloco.");
  trireme::DiLoCoOptions options{
      .sync_every = 20, .fragments = 2, .fragment_sync_delay = 5, .across = across};
  if (method == "sparse") {
    made.outer = std::make_unique<torch::optim::SGD>(net->parameters(), 1.0);
    options = {.sync_every = 20, .outer_optimizers = {made.outer.get()}, .across = across};
    options.compression = trireme::TopK{.density = 1.0 / 64, .chunk = 4096, .decay = 0.95};
  }
  made.rounds = std::make_unique<trireme::DiLoCo>(*net, optimizer, options);
  return made;
}

int main(int argc, char** argv) {
  const std::optional<Arguments> args = parse(argc, argv);
  if (!args) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS] [--method NAME]\n", argv[0]);
    return 2;
  }
  trireme::Context ctx = trireme::init();
  const torch::Tensor text = read_text(args->text);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  net->to(ctx.device());
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-3));
  const Method method = make_rounds(args->method, net, optimizer, ctx);  // ROUNDS

  const int64_t share = kBatch / ctx.world();
  for (int64_t step = 0; step < args->steps; ++step) {
    const int64_t first = (step * kBatch + ctx.rank() * share) * 7;
    const torch::Tensor rows = torch::arange(first, first + share * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    const torch::Tensor scores = net->forward(batch.narrow(1, 0, kContext));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(scores, batch.select(1, kContext));
    optimizer.zero_grad();
    loss.backward();
    method.rounds->step();  // ROUNDS
    if (step % 20 == 0 || step == args->steps - 1) {
      const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
      if (ctx.rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  return 0;
}
