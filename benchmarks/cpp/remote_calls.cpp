// What a call with a tensor of 4 bytes takes, there and back, from C++ to C++: one line of JSON
// with us per call, one entry per round and side. Rank 0 of two calls; the other one serves.
//
//   remote_calls ROUNDS [CALLS]     (as a rank: the variables of torchrun are set)
#include <trireme/comm/launch/launch.h>
#include <trireme/strategies/remote/endpoint.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace remote = trireme::remote;

namespace {

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
  remote::define("give_back", [](const at::Tensor& tensor) { return tensor; });
  remote::define("next", [](int64_t number) { return number + 1; });
  trireme::InitOptions on_cpu;
  on_cpu.device = at::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  remote::Endpoint endpoint(ctx, ctx.rank() == 0 ? "caller" : "callee");
  if (ctx.rank() == 0) {
    const at::Tensor tensor = at::zeros({1});
    measure(
        {{"call", [&] { endpoint.call<at::Tensor>("callee", "give_back", tensor); }},
         {"call_async and wait",
          [&] { endpoint.call_async<at::Tensor>("callee", "give_back", tensor).wait(); }},
         {"call with an integer", [&] { endpoint.call<int64_t>("callee", "next", int64_t{1}); }}},
        rounds, calls);
  }
  endpoint.stop();
  return 0;
}
