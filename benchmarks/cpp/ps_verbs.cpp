// What pulls and pushes of 4 bytes take in C++: one line of JSON with us per call, one entry per
// round and verb. Rank 0 of two works; the other one waits.
//
//   ps_verbs ROUNDS [CALLS]     (as a rank: the variables of torchrun are set)
#include <trireme/comm/launch/launch.h>
#include <trireme/strategies/parameter_server/parameter_server.h>

#include <torch/nn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "sides_in_turns.h"

namespace ps = trireme::ps;

namespace {

struct OneImpl : torch::nn::Module {
  OneImpl() : x(register_parameter("x", torch::zeros({1}))) {}
  torch::Tensor x;
};
TORCH_MODULE(One);

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
