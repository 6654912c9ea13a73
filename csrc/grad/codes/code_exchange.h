#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/kernels/block_codes.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// The gradient of one parameter on its way: fp32 on the CPU.
struct CodedGradient {
  float* values = nullptr;  // this sender's, and then the senders' mean
  int64_t numel = 0;
  bool is_dense = false;     // goes as fp32
  int64_t first = 0;         // the place of its first value in the parameter
  at::Tensor residual = {};  // undefined where there is no feedback
  std::optional<uint32_t> dither = std::nullopt;
};

// The gradients of one bucket, which go from sender to sender together.
struct CodeExchange {
  std::shared_ptr<Communicator> senders;
  std::vector<CodedGradient> gradients = {};
  at::Tensor memory = {};  // holds their values
  double factor = 1;       // of the senders' sum
  std::string label = {};
  double input_scale = 1;  // of the values before they are coded
};

// A code under way.
struct CodesInFlight {
  Pending pending;         // whose wait() writes the means
  int64_t sent_bytes = 0;  // from this sender to others; an all-reduce counts once
};

// Starts to exchange codes in blocks: all go to all, and every sender adds them up in the order of
// ranks, so that all have the same bits. One all-gather of bytes. Extra memory: the codes of all
// senders.
TRIREME_API CodesInFlight gather_block_codes(const BlockFormat& format, CodeExchange exchange);

// Starts to all-reduce gradients that are rounded to `dtype`, fp16 or bf16, once they are
// multiplied by the factor: two all-reduces if some are dense. A residual of what becomes infinite,
// or was no number, stays.
TRIREME_API CodesInFlight reduce_casts(at::ScalarType dtype, CodeExchange exchange);

}  // namespace trireme
