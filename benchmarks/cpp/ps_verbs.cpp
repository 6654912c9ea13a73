// What pulls and pushes of 4 bytes take in C++: one line of JSON with us per call, one entry per
// round and verb. Rank 0 of two works; the other one waits.
//
//   ps_verbs ROUNDS [CALLS]     (as a rank: the variables of torchrun are set)
#include <trireme/comm/launch/launch.h>
#include <trireme/strategies/parameter_server/parameter_server.h>

#include <torch/nn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace ps = trireme::ps;

namespace {

struct OneImpl : torch::nn::Module {
  OneImpl() : x(register_parameter("x", torch::zeros({1}))) {}
  torch::Tensor x;
};
TORCH_MODULE(One);

struct Side {
  const char* name;
  std::function<void()> call;
};

double time_us(const std::function<void()>& call, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return took.count() / calls;
}

// Runs all sides once per round, every other round in reversed order, and prints their times.
void measure(const std::vector<Side>& sides, int rounds, int calls) {
  std::vector<std::string> lists(sides.size());
  for (const Side& side : sides) time_us(side.call, 100);
  for (int round = 0; round < rounds; ++round) {
    for (size_t turn = 0; turn < sides.size(); ++turn) {
      const size_t at = round % 2 == 0 ? turn : sides.size() - 1 - turn;
      lists[at] += (round == 0 ? "" : ", ") + std::to_string(time_us(sides[at].call, calls));
    }
  }
  std::string line;
  for (size_t at = 0; at < sides.size(); ++at)
    line += std::string(at == 0 ? "" : ", ") + "\"" + sides[at].name + "\": [" + lists[at] + "]";
  std::printf("{%s}\n", line.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s ROUNDS [CALLS]\n", argv[0]);
    return 2;
  }
  const int rounds = std::atoi(argv[1]);
  const int calls = argc > 2 ? std::atoi(argv[2]) : 20000;
  trireme::InitOptions on_cpu;
  on_cpu.device = torch::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  One filled, bound;
  ps::Options loose;
  loose.mode = ps::Mode::kAsync;
  ps::ParameterServer server(
      ctx,
      {ps::dense("one", filled, ps::SGD{.lr = 0.1}), ps::sparse("rows", 1, ps::SGD{.lr = 0.1})},
      loose);
  ps::ParameterServer strict(ctx, {ps::dense("one", bound, ps::SGD{.lr = 0.1})});
  if (ctx.rank() == 0) {
    const torch::Tensor gradient = torch::zeros({1});
    const torch::Tensor id = torch::zeros({1}, torch::kLong);
    const torch::Tensor row = torch::zeros({1, 1});
    ps::DenseTable& table = server.dense("one");
    ps::SparseTable& rows = server.sparse("rows");
    measure({{"pull", [&] { table.pull(); }},
             {"push",
              [&] {
                filled->x.mutable_grad() = gradient;
                table.push();
              }},
             {"pull, bound", [&] { strict.dense("one").pull(); }},
             {"pull of a row", [&] { rows.pull(id); }},
             {"push of a row", [&] { rows.push(id, row); }}},
            rounds, calls);
  }
  ctx.communicator()->barrier("the end").wait();
  return 0;
}
