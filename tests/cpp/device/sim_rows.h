#pragma once

#include <ATen/ATen.h>

#include <device/sim_device.h>
#include <device/sim_stream.h>

namespace trireme::test {

// Rows of one value, on the CPU and on sim:0.

inline at::Tensor pinned(double value) {
  return at::full({4}, value, at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
}
// Enqueued.
inline at::Tensor to_sim(const at::Tensor& row) {
  return row.to(sim_device(0), /*non_blocking=*/true);
}
// What the current stream reads now.
inline bool are(const at::Tensor& row, double value) {
  return row.cpu().eq(value).all().item<bool>();
}

inline SimStream& current_stream() { return sim_stream(current_sim_stream(sim_device(0))); }

}  // namespace trireme::test
