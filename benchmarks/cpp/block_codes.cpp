// What one thread needs to code gradients, the residual included: one line of JSON with us per
// call, one entry per round and side. A call of "in-place pass" reads and writes all elements once.
//
//   block_codes ROUNDS [CALLS [NUMEL]]
//
// Codes in blocks are those of kernels/block_codes.h, with the blocks that are the methods'
// default. A cast is what grad/codes/code_exchange.h does before an all-reduce, on a rank alone.
#include <trireme/kernels/block_codes.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/grad/codes/code_exchange.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/kernels/sparse_codes.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "sides_in_turns.h"

namespace {

std::function<void()> encoding(const at::Tensor& values, const trireme::Compression& method) {
  const trireme::BlockFormat format = trireme::block_format(method).value();
  const at::Tensor residual = at::zeros_like(values);
  const at::Tensor code = at::empty({trireme::code_bytes(format, values.numel())}, at::kByte);
  return [=] {
    trireme::encode(format, {values.data_ptr<float>(), residual.data_ptr<float>(), values.numel()},
                    static_cast<std::byte*>(code.data_ptr()));
  };
}

// Sends those above a threshold that is kept from call to call, as TopK does by default.
std::function<void()> sparse(const at::Tensor& values, const trireme::TopK& method) {
  const trireme::SparseFormat format{.density = method.density};
  const at::Tensor residual = at::zeros_like(values);
  const at::Tensor code = at::empty({format.bytes(values.numel())}, at::kByte);
  const auto threshold = std::make_shared<float>(0.0F);
  return [=] {
    trireme::SparseValues from{values.data_ptr<float>(), residual.data_ptr<float>(),
                               values.numel()};
    from.threshold = threshold.get();
    trireme::encode(format, from, static_cast<std::byte*>(code.data_ptr()));
  };
}

// What is in flight is dropped: only the way there is timed.
std::function<void()> casting(const at::Tensor& values,
                              const std::shared_ptr<trireme::Communicator>& alone) {
  const auto kept = std::make_shared<trireme::KeptOfCode>();
  kept->residual = at::zeros_like(values);
  const trireme::CodedGradient gradient{
      .values = values.data_ptr<float>(), .numel = values.numel(), .kept = kept.get()};
  const trireme::CodeExchange exchange{
      .senders = alone, .gradients = {gradient}, .memory = values, .label = "cast"};
  return [kept, exchange] { trireme::start_exchange(trireme::Fp16{}, exchange); };
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s ROUNDS [CALLS [NUMEL]]\n", argv[0]);
    return 2;
  }
  const int rounds = std::atoi(argv[1]);
  const int calls = argc > 2 ? std::atoi(argv[2]) : 5;
  const int64_t numel = argc > 3 ? std::atoll(argv[3]) : int64_t{1} << 24;
  trireme::InitOptions on_cpu;
  on_cpu.device = at::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  at::set_num_threads(1);
  const at::Tensor pass = at::ones({numel});
  const at::Tensor values = at::randn({numel});
  measure({{"in-place pass", [&] { pass.mul_(1.0000001); }},
           {"int8", encoding(values, trireme::Int8{})},
           {"int4", encoding(values, trireme::Int4{})},
           {"sign", encoding(values, trireme::Sign{})},
           {"fp16", casting(values, ctx.communicator())},
           {"top 1 %", sparse(values, trireme::TopK{})}},
          rounds, calls);
  return 0;
}
