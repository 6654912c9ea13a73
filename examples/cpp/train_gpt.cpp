// Trains a small GPT on text, with all that a real run has: each rank's part of the data in a new
// order per epoch, validation, clipping, a learning-rate schedule, bf16, checkpoints. Copy it and
// put your model and your data in.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_gpt README.md
//   ... train_gpt README.md --strategy fsdp --epochs 4 --checkpoint build/gpt
//
// Started again it goes on from the checkpoint, also with another strategy or number of ranks.
// examples/python/train_gpt.py is its Python sibling.

#include <trireme/trireme.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>

constexpr int64_t kLength = 32;  // bytes that the model sees at once
constexpr int64_t kWidth = 32;
constexpr double kLearningRate = 3e-3;
constexpr int64_t kWarmUp = 20;  // steps

struct Arguments {
  std::string text, strategy = "ddp", checkpoint;
  int64_t epochs = 2;
  int64_t stop_after = 0;  // so many of them; 0: train to the end
  int64_t batch = 16;      // windows per rank
  bool bf16 = false;
};

// Bytes [rows, length] in, scores of each next byte [rows, length, 256] out.
struct GptImpl : torch::nn::Module {
  GptImpl()
      : tokens(register_module("tokens", torch::nn::Embedding(256, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kLength, kWidth))),
        blocks(register_module(
            "blocks",
            torch::nn::TransformerEncoder(torch::nn::TransformerEncoderLayer(
                                              torch::nn::TransformerEncoderLayerOptions(kWidth, 4)
                                                  .dim_feedforward(4 * kWidth)
                                                  .dropout(0.0)),
                                          2))),
        head(register_module("head", torch::nn::Linear(kWidth, 256))),
        mask(register_buffer(
            "mask", torch::nn::TransformerImpl::generate_square_subsequent_mask(kLength))) {}

  torch::Tensor forward(const torch::Tensor& bytes) {
    const torch::Tensor x = tokens(bytes) + positions->weight;
    return head(blocks(x.transpose(0, 1), mask).transpose(0, 1));
  }

  torch::nn::Embedding tokens, positions;
  torch::nn::TransformerEncoder blocks;
  torch::nn::Linear head;
  torch::Tensor mask;
};
TORCH_MODULE(Gpt);

// While it lives, operators that profit from it compute in bf16, as under torch.autocast in Python.
// bf16 has the range of fp32: nothing has to be scaled.
class Bf16 {
 public:
  Bf16(c10::DeviceType type, bool enabled)
      : type_(type), before_(at::autocast::is_autocast_enabled(type)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(type_, enabled);
    at::autocast::set_autocast_dtype(type_, torch::kBFloat16);
  }
  ~Bf16() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, before_);
  }
  Bf16(const Bf16&) = delete;
  Bf16& operator=(const Bf16&) = delete;

 private:
  c10::DeviceType type_;
  bool before_;
};

// What differs between strategies.
struct Training {
  std::function<torch::Tensor(const torch::Tensor&)> forward;
  std::function<void(double max_norm)> clip;
  std::function<void()> step;
  std::shared_ptr<torch::nn::Module> model;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
};

// `Model` is a module holder.
template <typename Model>
Training with_plain_optimizer(Model model) {
  auto adam = std::make_shared<torch::optim::AdamW>(model->parameters(), kLearningRate);
  return {[model](const torch::Tensor& x) mutable { return model->forward(x); },
          [model](double norm) { torch::nn::utils::clip_grad_norm_(model->parameters(), norm); },
          [adam] { adam->step(); }, model.ptr(), adam};
}

template <typename Model>
Training with_zero(Gpt net, Model model, int64_t stage) {
  using Optimizer = trireme::ZeroRedundancyOptimizer<torch::optim::AdamW>;
  auto zero = std::make_shared<Optimizer>(net, torch::optim::AdamWOptions(kLearningRate),
                                          trireme::ZeroOptions{.stage = stage});
  return {[model](const torch::Tensor& x) mutable { return model->forward(x); },
          [zero](double norm) { zero->clip_grad_norm_(norm); }, [zero] { zero->step(); },
          model.ptr(), zero};
}

Training make_training(const std::string& strategy, Gpt net) {
  if (strategy == "single") return with_plain_optimizer(net);
  if (strategy == "ddp") return with_plain_optimizer(trireme::DistributedDataParallel<Gpt>(net));
  if (strategy == "zero1") return with_zero(net, trireme::DistributedDataParallel<Gpt>(net), 1);
  if (strategy == "zero2") return with_zero(net, net, 2);  // the optimizer averages
  TORCH_CHECK(strategy == "fsdp", "[train_gpt] got strategy '", strategy,
              "', expected single, ddp, zero1, zero2 or fsdp.");
  Training made = with_plain_optimizer(trireme::fully_shard(net));
  const auto model = std::dynamic_pointer_cast<trireme::ShardedModule>(made.model);
  made.clip = [model](double norm) { model->clip_grad_norm_(norm); };
  made.step = [adam = made.optimizer] { trireme::step(*adam); };
  return made;
}

torch::Tensor read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > 64 * kLength, "[train_gpt] got '", path, "' with ", text.size(),
              " bytes, expected a text of more than ", 64 * kLength, ". Name another file.");
  const auto bytes = static_cast<int64_t>(text.size());
  return torch::from_blob(text.data(), {bytes}, torch::kByte).to(torch::kLong);
}

// Calls `visit` with each batch of this rank. Give the sampler its epoch before: a loader copies
// it.
template <typename Sampler, typename Visit>
void for_each_batch(const torch::Tensor& windows, const Sampler& sampler, int64_t batch_size,
                    const Visit& visit) {
  auto data = torch::data::datasets::TensorDataset(windows).map(
      torch::data::transforms::Stack<torch::data::TensorExample>());
  auto loader = torch::data::make_data_loader(std::move(data), sampler, batch_size);
  for (const auto& batch : *loader) visit(batch.data);
}

// It depends on the number of the step alone, so that a resumed run goes on with it. LibTorch's
// LRSchedulers cannot be saved.
double learning_rate(int64_t step, int64_t steps) {
  if (step < kWarmUp) return kLearningRate * static_cast<double>(step + 1) / kWarmUp;
  return kLearningRate * 0.5 *
         (1 + std::cos(M_PI * static_cast<double>(step - kWarmUp) /
                       static_cast<double>(std::max<int64_t>(1, steps - kWarmUp))));
}

void run(const Arguments& args, trireme::Context& ctx) {
  TORCH_CHECK(args.strategy != "single" || ctx.world() == 1, "[train_gpt] got ", ctx.world(),
              " ranks for --strategy single. Start it without torchrun.");
  torch::manual_seed(0);
  Gpt net;
  net->to(ctx.device());
  const Training training = make_training(args.strategy, net);

  const torch::Tensor windows = read_text(args.text).unfold(0, kLength + 1, kLength);
  const int64_t held_out = windows.size(0) / 10;
  const torch::Tensor train_part = windows.slice(0, held_out);
  const torch::Tensor test_part = windows.slice(0, 0, held_out);
  // All ranks get as many windows: some get the first ones twice.
  torch::data::samplers::DistributedRandomSampler order(train_part.size(0), ctx.world(),
                                                        ctx.rank());
  const torch::data::samplers::DistributedSequentialSampler in_order(test_part.size(0), ctx.world(),
                                                                     ctx.rank());
  const int64_t per_rank = (train_part.size(0) + ctx.world() - 1) / ctx.world();
  const int64_t steps_per_epoch = (per_rank + args.batch - 1) / args.batch;

  const auto loss_of = [&](const torch::Tensor& batch) {
    const torch::Tensor rows = batch.to(ctx.device());
    const Bf16 bf16(ctx.device().type(), args.bf16);
    const torch::Tensor scores = training.forward(rows.narrow(1, 0, kLength));
    return torch::nn::functional::cross_entropy(scores.flatten(0, 1).to(torch::kFloat),
                                                rows.narrow(1, 1, kLength).flatten());
  };
  const auto mean_over_ranks = [&](const torch::Tensor& total, int64_t count) {
    return trireme::all_mean(*ctx.communicator(), total / count).item<double>();
  };

  long step = 0;
  if (!args.checkpoint.empty() && std::filesystem::exists(args.checkpoint)) {
    const std::string extra = trireme::load_checkpoint(args.checkpoint, *training.model,
                                                       {.optimizer = training.optimizer.get()});
    TORCH_CHECK(std::sscanf(extra.c_str(), " { \"step\" : %ld", &step) == 1, "[train_gpt] got '",
                extra, "' in ", args.checkpoint, ", expected a step. Name another checkpoint.");
  }
  const int64_t first = step / steps_per_epoch;
  const int64_t end =
      args.stop_after > 0 ? std::min(args.epochs, first + args.stop_after) : args.epochs;
  for (int64_t epoch = first; epoch < end; ++epoch) {
    torch::Tensor train_loss = torch::zeros({}, ctx.device());
    training.model->train();
    order.set_epoch(static_cast<size_t>(epoch));  // else every epoch has the order of the first
    for_each_batch(train_part, order, args.batch, [&](const torch::Tensor& batch) {
      for (auto& group : training.optimizer->param_groups())
        group.options().set_lr(learning_rate(step, args.epochs * steps_per_epoch));
      training.optimizer->zero_grad();
      const torch::Tensor loss = loss_of(batch);
      loss.backward();
      training.clip(1.0);
      training.step();
      train_loss += loss.detach();
      ++step;
    });

    const torch::NoGradGuard no_grad;
    torch::Tensor test_loss = torch::zeros({}, ctx.device());
    int64_t test_batches = 0;
    training.model->eval();
    for_each_batch(test_part, in_order, args.batch, [&](const torch::Tensor& batch) {
      test_loss += loss_of(batch);
      ++test_batches;
    });
    const double of_train = mean_over_ranks(train_loss, steps_per_epoch);
    const double of_test = mean_over_ranks(test_loss, test_batches);
    if (ctx.rank() == 0) {
      std::printf("epoch %ld  train loss %.9g  test loss %.9g\n", static_cast<long>(epoch + 1),
                  of_train, of_test);
    }
    if (!args.checkpoint.empty()) {  // on all ranks: each writes its part
      trireme::save_checkpoint(args.checkpoint, *training.model,
                               {.optimizer = training.optimizer.get(),
                                .extra = "{\"step\": " + std::to_string(step) + "}"});
    }
  }
}

int main(int argc, char** argv) {
  Arguments args;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--bf16") {
      args.bf16 = true;
      continue;
    }
    if (name.rfind("--", 0) == 0) ++i;
    if (name == "--strategy") {
      args.strategy = value;
    } else if (name == "--checkpoint") {
      args.checkpoint = value;
    } else if (name == "--epochs") {
      args.epochs = std::atoll(value);
    } else if (name == "--stop-after") {
      args.stop_after = std::atoll(value);
    } else if (name == "--batch-size") {
      args.batch = std::atoll(value);
    } else {
      args.text = name;
    }
  }
  if (args.text.empty() || args.text.rfind("--", 0) == 0) {
    std::fprintf(stderr,
                 "usage: %s TEXT_FILE [--strategy single|ddp|zero1|zero2|fsdp] [--epochs N]\n"
                 "       [--stop-after N] [--batch-size N] [--bf16] [--checkpoint FOLDER]\n",
                 argv[0]);
    return 2;
  }
  try {
    trireme::Context ctx = trireme::init();
    run(args, ctx);
  } catch (const c10::Error& error) {  // what() would add the stack
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
  return 0;
}
