// Trains a recurrent net whose embedding and decoder live at another rank, and whose LSTM is here.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/remote_rnn 60
//
// Rank 0 ("ps") owns the two layers that grow with the vocabulary, and steps them; rank 1
// ("trainer") has the LSTM and the data. The loop is that of one process. First weights are made by
// a formula, so that examples/python/remote_rnn.py reaches the same losses.

#include <trireme/strategies/remote/endpoint.h>
#include <trireme/trireme.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <vector>

namespace remote = trireme::remote;

constexpr int64_t kTokens = 24;
constexpr int64_t kWidth = 16;
constexpr int64_t kHidden = 32;
constexpr int64_t kLength = 12;
constexpr int64_t kBatch = 8;
constexpr double kLr = 0.01;

// Writes small numbers without a pattern; `first` tells modules apart.
void make_weights(torch::nn::Module& module, int64_t first) {
  const torch::NoGradGuard no_grad;
  int64_t number = first;
  for (torch::Tensor& parameter : module.parameters()) {
    const torch::Tensor places = torch::arange(parameter.numel(), torch::kDouble);
    parameter.copy_((0.2 * torch::sin(places * places + number)).view_as(parameter));
    ++number;
  }
}

std::shared_ptr<torch::nn::EmbeddingImpl> make_embedding() {
  auto embedding = std::make_shared<torch::nn::EmbeddingImpl>(kTokens, kWidth);
  make_weights(*embedding, 1);
  return embedding;
}

std::shared_ptr<torch::nn::LinearImpl> make_decoder() {
  auto decoder = std::make_shared<torch::nn::LinearImpl>(kHidden, kTokens);
  make_weights(*decoder, 2);
  return decoder;
}

// Each token follows from the one before it; every 17th is another one.
torch::Tensor make_text(int64_t length) {
  std::vector<int64_t> text = {1};
  for (int64_t place = 1; place < length; ++place)
    text.push_back(place % 17 == 0 ? place * place % kTokens : (5 * text.back() + 7) % kTokens);
  return torch::tensor(text);
}

void train(remote::Endpoint& endpoint, int64_t steps) {
  remote::RemoteModule embedding =
      endpoint.module("ps", "make_embedding", {.optimizer = trireme::AdamSpec{.lr = kLr}});
  remote::RemoteModule decoder =
      endpoint.module("ps", "make_decoder", {.optimizer = trireme::AdamSpec{.lr = kLr}});
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(kWidth, kHidden).batch_first(true));
  make_weights(*lstm, 4);
  torch::optim::Adam optimizer(lstm->parameters(), torch::optim::AdamOptions(kLr));

  const torch::Tensor windows = make_text(2000).unfold(0, kLength + 1, 1);
  for (int64_t step = 0; step < steps; ++step) {
    const torch::Tensor rows = (torch::arange(kBatch) * 97 + step * 13) % windows.size(0);
    const torch::Tensor batch = windows.index_select(0, rows);
    const torch::Tensor inputs = batch.narrow(1, 0, kLength);
    const torch::Tensor targets = batch.narrow(1, 1, kLength);
    const torch::Tensor states = std::get<0>(lstm->forward(embedding.forward(inputs)));
    const torch::Tensor guesses = decoder.forward(states);
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(guesses.flatten(0, 1), targets.flatten());
    embedding.zero_grad();
    decoder.zero_grad();
    optimizer.zero_grad();
    loss.backward();  // goes to the decoder there, the LSTM here, and the embedding there
    embedding.step();
    decoder.step();
    optimizer.step();
    if (step % 10 == 0 || step == steps - 1) {
      std::printf("step %ld loss %.4f\n", static_cast<long>(step), loss.item<double>());
      std::fflush(stdout);
    }
  }
}

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 60;
  trireme::InitOptions on_cpu;
  on_cpu.device = torch::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  if (ctx.world() != 2) {
    std::fprintf(stderr, "got %d ranks, expected 2. Use torchrun --nproc-per-node 2.\n",
                 static_cast<int>(ctx.world()));
    return 2;
  }
  remote::define_module("make_embedding", &make_embedding);
  remote::define_module("make_decoder", &make_decoder);
  remote::Endpoint endpoint(ctx, ctx.rank() == 0 ? "ps" : "trainer");
  if (ctx.rank() == 1) train(endpoint, steps);
  endpoint.stop();  // "ps" serves until the trainer is here
  return 0;
}
