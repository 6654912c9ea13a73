// Trains six modules as the stages of a pipeline, of which each rank makes its own only: no rank
// holds the model. A stage hands on two tensors, what it has computed and what it has read.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_stage_pipeline
//   README.md
//
// Runs on 1, 2, 3 or 6 ranks and reaches the same loss on all of these.

#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

constexpr int64_t kContext = 32;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 64;
constexpr int64_t kStages = 6;
constexpr int64_t kRead = 16 * kContext;  // elements of a row of embeddings
constexpr int64_t kWidth = 64;

using TwoTensors = std::tuple<torch::Tensor, torch::Tensor>;

// The first stage takes what step() is given.
struct ReadsImpl : torch::nn::Module {
  ReadsImpl() {
    register_module("embedding", embedding);
    register_module("linear", linear);
  }
  TwoTensors forward(const torch::Tensor& characters) {
    const torch::Tensor read = embedding(characters).flatten(1);
    return {linear(read), read};
  }
  torch::nn::Embedding embedding{kCharacters, 16};
  torch::nn::Linear linear{kRead, kWidth};
};
TORCH_MODULE(Reads);

// A stage takes what the one before returns: as arguments, as here, or as a tuple, as below.
struct ThinksImpl : torch::nn::Module {
  ThinksImpl() {
    register_module("own", own);
    register_module("reads", reads);
  }
  TwoTensors forward(const torch::Tensor& state, const torch::Tensor& read) {
    return {state + torch::relu(own(state) + reads(read)), read};
  }
  torch::nn::Linear own{kWidth, kWidth};
  torch::nn::Linear reads{kRead, kWidth};
};
TORCH_MODULE(Thinks);

struct ScoresImpl : torch::nn::Module {
  ScoresImpl() { register_module("linear", linear); }
  torch::Tensor forward(const TwoTensors& both) { return linear(std::get<0>(both)); }
  torch::nn::Linear linear{kWidth, kCharacters};
};
TORCH_MODULE(Scores);

trireme::PipelineStage make_stage(int64_t number, torch::Device device) {
  torch::manual_seed(number);  // values do not depend on the rank that makes it
  const trireme::PipelineStageOptions options{.stage = number, .stages = kStages};
  const auto made = [&](auto module) {
    module->to(device);
    return trireme::PipelineStage(module, options);
  };
  if (number == 0) return made(Reads());
  if (number == kStages - 1) return made(Scores());
  return made(Thinks());
}

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_stage_pipeline] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next) {
  return torch::nn::functional::cross_entropy(scores, next);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  trireme::Context ctx = trireme::init();
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  // Under interleaved-1f1b stage i is on rank i % world.
  std::vector<trireme::PipelineStage> stages;
  for (int64_t number = ctx.rank(); number < kStages; number += ctx.world())
    stages.push_back(make_stage(number, ctx.device()));
  trireme::PipelineOptions options{.chunks = 4, .schedule = "interleaved-1f1b"};
  options.stages_per_rank = kStages / ctx.world();
  trireme::StagePipeline model(stages, options);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kBatch * 7;
    const torch::Tensor rows = torch::arange(first, first + kBatch * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows).to(ctx.device());
    optimizer.zero_grad();
    const torch::Tensor loss =
        model->step(batch.narrow(1, 0, kContext), batch.select(1, kContext), loss_of);
    optimizer.step();
    if (step % 20 == 0 || step == steps - 1) {
      if (ctx.rank() == 0)
        std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), loss.item<double>());
    }
  }
  return 0;
}
