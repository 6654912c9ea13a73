// The model and data of train_ddp.cpp, whose gradients travel as codes of fewer bytes:
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_compressed README.md
//   100
//   ... train_compressed README.md 100 --method sign
//
// Methods are int8 (the default), int4, sign, fp16, bf16 and none. The line marked COMPRESSION is
// all that a program with DistributedDataParallel has to change. Compression is meant for links
// between hosts, and on one host the default of all methods, Between::kHosts, sends gradients as
// they are. This program has something to show on one machine, too: it compresses between all ranks
// unless told `--between hosts`. At the end it prints what a rank has sent.
//
// examples/python/train_compressed.py is the same program in Python and reaches the same losses.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
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
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_compressed] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

struct Arguments {
  std::string text, method = "int8", between = "ranks";
  int64_t steps = 100;
};

std::optional<Arguments> parse(int argc, char** argv) {
  Arguments args;
  int positional = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--method" && i + 1 < argc) {
      args.method = argv[++i];
    } else if (word == "--between" && i + 1 < argc) {
      args.between = argv[++i];
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

trireme::Between between_of(const std::string& name) {
  TORCH_CHECK(name == "hosts" || name == "ranks", "[train_compressed] got --between ", name,
              ", expected hosts or ranks. Leave it out for ranks.");
  return name == "hosts" ? trireme::Between::kHosts : trireme::Between::kRanks;
}

std::optional<trireme::Compression> compression_of(const std::string& method,
                                                   trireme::Between between) {
  if (method == "none") return std::nullopt;
  if (method == "int8") return trireme::Int8{.between = between};
  if (method == "int4") return trireme::Int4{.between = between};
  if (method == "sign") return trireme::Sign{.between = between};
  if (method == "fp16") return trireme::Fp16{.between = between};
  TORCH_CHECK(method == "bf16", "[train_compressed] got --method ", method,
              ", expected int8, int4, sign, fp16, bf16 or none. Leave it out for int8.");
  return trireme::Bf16{.between = between};
}

int main(int argc, char** argv) {
  const std::optional<Arguments> args = parse(argc, argv);
  if (!args) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS] [--method NAME] [--between ranks|hosts]\n",
                 argv[0]);
    return 2;
  }
  trireme::Context ctx = trireme::init();
  const torch::Tensor text = read_text(args->text);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  net->to(ctx.device());
  trireme::DdpOptions options;
  options.compression = compression_of(args->method, between_of(args->between));  // COMPRESSION
  trireme::DistributedDataParallel<NextCharacter> model(net, options);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  const int64_t share = kBatch / ctx.world();
  for (int64_t step = 0; step < args->steps; ++step) {
    const int64_t first = (step * kBatch + ctx.rank() * share) * 7;
    const torch::Tensor rows = torch::arange(first, first + share * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    const torch::Tensor scores = model->forward(batch.narrow(1, 0, kContext));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(scores, batch.select(1, kContext));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 20 == 0 || step == args->steps - 1) {
      const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
      if (ctx.rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  if (ctx.rank() == 0) {
    const trireme::StepReport last = model->last_step();
    std::printf("%s: %ld bytes of gradients, %ld sent as codes in a step\n", args->method.c_str(),
                static_cast<long>(last.reduced_bytes), static_cast<long>(last.sent_bytes));
  }
  return 0;
}
