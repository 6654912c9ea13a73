// What a call with a tensor of 4 bytes takes, there and back, from C++ to C++: one line of JSON
// with us per call, one entry per round and side. Rank 0 of two calls; the other one serves.
//
//   remote_calls ROUNDS [CALLS]     (as a rank: the variables of torchrun are set)
#include <trireme/comm/launch/launch.h>
#include <trireme/strategies/remote/endpoint.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "sides_in_turns.h"

namespace remote = trireme::remote;

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
