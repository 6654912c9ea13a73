// Trains the model of train_ddp.cpp, and goes on where it was stopped, with any number of ranks:
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_resume README.md 100
//   run
//
// Stop it anywhere (Ctrl-C, kill -9), start it again with another number of ranks: it loads the
// newest whole checkpoint of the folder, and the losses are those of a run that nobody has
// disturbed. A checkpoint is saved every 10 steps while the next steps run. The lines marked RESUME
// are all that a training loop needs for that.
//
// examples/python/train_resume.py is the same program in Python and reaches the same losses.

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
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_resume] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kContext + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 5) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS] [FOLDER] [EVERY]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  const std::string folder = argc > 3 ? argv[3] : "run";
  const int64_t every = argc > 4 ? std::atoll(argv[4]) : 10;
  trireme::Context ctx = trireme::init();
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  NextCharacter net;
  net->to(ctx.device());
  trireme::DistributedDataParallel<NextCharacter> model(net);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  trireme::GlobalBatch batches({.rows = windows.size(0), .size = kBatch});  // RESUME
  trireme::CheckpointsOptions options;
  options.every = every;
  options.batches = &batches;
  trireme::Checkpoints saves(folder, *model, &optimizer, options);       // RESUME
  const std::optional<trireme::LoadedStep> start = saves.load_latest();  // RESUME
  if (ctx.rank() == 0 && start)
    std::printf("goes on after %ld steps on %ld ranks\n", static_cast<long>(start->step),
                static_cast<long>(ctx.world()));

  for (int64_t step = start ? start->step : 0; step < steps; ++step) {  // RESUME
    const trireme::BatchPart part = batches.part(step);                 // RESUME
    const torch::Tensor batch = windows.index_select(0, part.rows).to(ctx.device());
    const torch::Tensor scores = model->forward(batch.narrow(1, 0, kContext));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(scores, batch.select(1, kContext));
    optimizer.zero_grad();
    (loss * part.weight).backward();
    trireme::step(optimizer);  // RESUME: a step that tells a save on its way
    saves.step(step + 1);      // RESUME
    if (step % 5 == 4) {
      const torch::Tensor share = loss.detach() * part.weight;
      const double mean = trireme::all_mean(*ctx.communicator(), share).item<double>();
      if (ctx.rank() == 0) {
        std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
        std::fflush(stdout);
      }
    }
  }
  saves.wait();  // RESUME
  return 0;
}
