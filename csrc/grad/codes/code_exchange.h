#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/code_memory.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/residuals.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// The gradient of one parameter, or a part of it, on its way: fp32 on the CPU.
struct CodedGradient {
  float* values = nullptr;  // this sender's, and then the senders' mean
  int64_t numel = 0;
  bool is_dense = false;       // goes as fp32
  int64_t first = 0;           // the place of its first value in the parameter
  MatrixShape shape = {};      // of all of the parameter
  KeptOfCode* kept = nullptr;  // null if it is dense
  uint32_t draw = 0;           // a number drawn from the step and the name, the same on all senders
};

// The gradients of one bucket, which go from sender to sender together.
struct CodeExchange {
  std::shared_ptr<Communicator> senders;
  std::vector<CodedGradient> gradients = {};
  at::Tensor memory = {};  // holds their values
  double factor = 1;       // of the senders' sum
  std::string label = {};
  double input_scale = 1;             // of the values before they are coded
  CodeMemory* code_memory = nullptr;  // for the codes; null: memory of their own
};

// A code under way.
struct CodesInFlight {
  Pending pending;         // whose wait() writes the means
  int64_t sent_bytes = 0;  // from this sender to others; an all-reduce counts once
  // Starts the second journey of a code that has two, once the first is there, for which it waits.
  // Called before the wait, bucket by bucket in their order.
  std::function<void()> go_on = nullptr;
};

// Codes the gradients and starts to exchange them. Codes in blocks and of the largest values all go
// to all, in one all-gather of bytes, and every sender adds them up in the order of ranks, so that
// all have the same bits; extra memory: the codes of all senders. Casts do so between two senders;
// between more of them they are all-reduced. So are values at positions drawn alike, and the
// matrices of PowerSGD, in two journeys. Dense
// gradients are in that gather, or in an all-reduce of their own.
//
// A residual stays as it is where a value is no finite number: of that value (casts), block, chunk,
// or parameter.
TRIREME_API CodesInFlight start_exchange(const Compression& compression, CodeExchange exchange);

}  // namespace trireme
