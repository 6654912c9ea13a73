// Trains the model of train_pipeline.cpp as a pipeline in this process: no ranks, no launcher.
//
//   build/current/examples/cpp/train_pipeline_threads README.md
//
// The stages compute at the same time, each on a thread of its own, and the loss is computed
// outside. The two lines marked PIPE are all that a plain LibTorch loop has to change.
// examples/python/train_pipeline_threads.py is the same program in Python, with the same loss.

#include <trireme/trireme.h>  // PIPE 1

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

constexpr int64_t kContext = 32;
constexpr int64_t kCharacters = 128;
constexpr int64_t kBatch = 64;

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kContext + 1), "[train_pipeline_threads] got '",
              path, "' with ", text.size(), " characters, expected a text of more than ",
              kContext + 1, ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS [THREADS]]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  const int64_t threads = argc > 3 ? std::atoll(argv[3]) : 2;
  const torch::Tensor text = read_text(argv[1]);
  const torch::Tensor windows = text.unfold(0, kContext + 1, 1);

  torch::manual_seed(0);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Embedding(kCharacters, 32));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(32 * kContext, 256));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(256, 128));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(128, kCharacters));
  trireme::Pipeline<> model(
      net, trireme::PipelineOptions{.ranks = false, .threads = threads, .chunks = 4});  // PIPE 2
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kBatch * 7;
    const torch::Tensor rows = torch::arange(first, first + kBatch * 7, 7) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows);
    optimizer.zero_grad();
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        model->forward(batch.narrow(1, 0, kContext)), batch.select(1, kContext));
    loss.backward();
    optimizer.step();
    if (step % 20 == 0 || step == steps - 1) {
      std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), loss.item<double>());
    }
  }
}
