// Trains embeddings in a sparse table together with layers under DistributedDataParallel.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/train_ps_embedding README.md
//
// The model guesses the next character from the last ones: from the last one, the last two, and so
// on up to five, each of which has a row by its characters. Nobody counts beforehand how many there
// are. examples/python/ps_hybrid_ddp.py is the same program in Python and reaches the same losses.

#include <trireme/strategies/parameter_server/embedding.h>
#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace ps = trireme::ps;

constexpr int64_t kLength = 5;
constexpr int64_t kCharacters = 128;
constexpr int64_t kWidth = 32;
constexpr int64_t kBatch = 64;  // all workers share it

torch::Tensor read_text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TORCH_CHECK(text.size() > static_cast<size_t>(kLength + 1), "[train_ps_embedding] got '", path,
              "' with ", text.size(), " characters, expected a text of more than ", kLength + 1,
              ". Name another file.");
  torch::Tensor bytes = torch::from_blob(const_cast<char*>(text.data()),
                                         {static_cast<int64_t>(text.size())}, torch::kByte);
  return bytes.to(torch::kLong).clamp_max(kCharacters - 1);
}

// Returns an id for the last character of each context, the last two, ... as [contexts, kLength].
torch::Tensor ids_of(const torch::Tensor& contexts) {
  std::vector<torch::Tensor> codes;
  torch::Tensor code = torch::zeros({contexts.size(0)}, torch::kLong);
  for (int64_t place = kLength - 1; place >= 0; --place) {
    code = code * kCharacters + contexts.select(1, place) + 1;
    codes.push_back(code);
  }
  return torch::stack(codes, 1);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS]\n", argv[0]);
    return 2;
  }
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  trireme::InitOptions on_cpu;  // its tables lie in the memory of the host
  on_cpu.device = torch::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  const torch::Tensor windows = read_text(argv[1]).unfold(0, kLength + 1, 1);

  torch::manual_seed(0);
  ps::SparseOptions options;
  options.init = ps::Normal{0.1};
  ps::ParameterServer server(ctx,
                             {ps::sparse("grams", kWidth, ps::RowwiseAdagrad{.lr = 0.3}, options)});
  ps::EmbeddingBag bag(server, "grams", torch::kSum);
  trireme::DistributedDataParallel<torch::nn::Linear> head(torch::nn::Linear(kWidth, kCharacters));
  torch::optim::AdamW optimizer(head->parameters(), torch::optim::AdamWOptions(1e-2));

  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kBatch * 7;
    const torch::Tensor rows = torch::arange(first, first + kBatch * 7, 7) % windows.size(0);
    const torch::Tensor own =
        rows.slice(0, ctx.rank(), torch::indexing::None, ctx.world());  // every so many
    const torch::Tensor batch = windows.index_select(0, own);
    const torch::Tensor summed = bag->forward(ids_of(batch.narrow(1, 0, kLength)));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(head->forward(summed), batch.select(1, kLength));
    optimizer.zero_grad();
    loss.backward();  // pushes rows, and averages the gradients of the other layers
    optimizer.step();
    server.clock();  // steps the rows that were pushed
    if (step % 20 == 0 || step == steps - 1) {
      const auto mean = trireme::all_mean(*ctx.communicator(), loss.detach()).item<double>();
      if (ctx.rank() == 0) std::printf("step %3ld  loss %.6f\n", static_cast<long>(step), mean);
    }
  }
  if (ctx.rank() == 0) std::printf("%ld rows\n", static_cast<long>(server.sparse("grams").size()));
  return 0;
}
