#include <trireme/kernels/cuda/optimizer_table.h>

#include <trireme/kernels/cpu/optimizer_loops.h>
#include <trireme/kernels/optimizer_step.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "catch_torch.h"
#include "kernels/optimizer_reference.h"

namespace trireme::optimizer_table_test {

// The arithmetic of the CUDA kernels, run on the host: every block and every thread in turn.
namespace {

using namespace trireme::cuda;
using reference::AdamTensors;

struct Numbers {
  template <typename T>
  static T widen(T value) {
    return value;
  }
  template <typename To, typename Value>
  static To cast(Value value) {
    return static_cast<To>(value);
  }
  template <typename T>
  static T multiply_add(T a, T b, T c) {
    return std::fma(a, b, c);
  }
  template <typename T>
  static T root(T value) {
    return std::sqrt(value);
  }
};

OptimizerSegment segment_of(const AdamTensors& tensors, size_t i) {
  return {tensors.params[i].data_ptr(),          tensors.grads[i].data_ptr(),
          tensors.exp_avgs[i].data_ptr(),        tensors.exp_avg_sqs[i].data_ptr(),
          tensors.max_exp_avg_sqs[i].data_ptr(), tensors.params[i].numel()};
}

// What adam_kernel and sgd_kernel do.
template <typename T, int kStates, typename Op>
void run_blocks(const OptimizerTable& table, const Op& op, bool write_grad) {
  for (int32_t block = 0; block < blocks_of(table); ++block) {
    const int32_t segment = segment_of(table, block);
    const auto chunk = chunk_of<T, T, T, kStates>(table, segment, block, write_grad);
    for (int32_t lane = 0; lane < kOptimizerThreads; ++lane) update_chunk(chunk, lane, op);
  }
}

// Uneven, some beyond one block, one that is not aligned for wide accesses.
AdamTensors uneven(at::ScalarType dtype) {
  AdamTensors tensors({{1}, {8192}, {8193}, {0}, {30001}, {5}}, dtype);
  tensors.add(reference::magnitudes({1001}, dtype, 9).narrow(0, 1, 1000));
  tensors.draw_grads(2);
  for (auto list : {&AdamTensors::exp_avg_sqs, &AdamTensors::max_exp_avg_sqs}) {
    for (at::Tensor& tensor : tensors.*list) tensor.uniform_(0, 1);
  }
  return tensors;
}

std::unique_ptr<OptimizerTable> table_of(const AdamTensors& tensors) {
  auto table = std::make_unique<OptimizerTable>();
  clear(*table);
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    REQUIRE(append(*table, segment_of(tensors, i), nullptr));
  }
  return table;
}

template <typename T, bool kL2, bool kAmsgrad>
void check_adam(at::ScalarType dtype, AdamScalars scalars) {
  const AdamTensors device = uneven(dtype);
  AdamTensors expected;
  expected = device.clone();
  const auto table = table_of(device);
  for (size_t i = 0; i < expected.params.size(); ++i) {
    adam_segment(segment_of(expected, i), {dtype, dtype}, scalars);
  }
  const T grad_factor = static_cast<T>(scalars.grad_factor);
  scalars.grad_factor = 1;
  const AdamOp<Numbers, kL2, kAmsgrad, T> op = {factors_of<T>(scalars), grad_factor};
  run_blocks<T, kAmsgrad ? 3 : 2>(*table, op, scalars.write_grad);
  for (size_t i = 0; i < expected.params.size(); ++i) {
    INFO("parameter " << i);
    CHECK(at::equal(device.params[i], expected.params[i]));
    CHECK(at::equal(device.grads[i], expected.grads[i]));
    CHECK(at::equal(device.exp_avgs[i], expected.exp_avgs[i]));
    CHECK(at::equal(device.exp_avg_sqs[i], expected.exp_avg_sqs[i]));
    CHECK(at::equal(device.max_exp_avg_sqs[i], expected.max_exp_avg_sqs[i]));
  }
}

AdamScalars adam_of(bool l2, bool amsgrad, bool write_grad) {
  AdamStepOptions options;
  options.weight_decay = 0.1;
  options.decoupled_weight_decay = !l2;
  options.amsgrad = amsgrad;
  options.maximize = l2;
  AdamScalars scalars = adam_scalars(options, 4);
  scalars.grad_factor = 0.3;
  scalars.write_grad = write_grad;
  return scalars;
}

bool cpu_fuses() { return cpu::supported_optimizer_loops().back().fuses; }

}  // namespace

TEST_CASE("the blocks of a launch give every element the bits of the CPU's Adam") {
  if (!cpu_fuses()) {
    SUCCEED("this CPU rounds twice where a GPU rounds once");
    return;
  }
  for (const bool write_grad : {false, true}) {
    INFO("write_grad " << write_grad);
    check_adam<float, true, true>(at::kFloat, adam_of(true, true, write_grad));
    check_adam<float, true, false>(at::kFloat, adam_of(true, false, write_grad));
    check_adam<float, false, true>(at::kFloat, adam_of(false, true, write_grad));
    check_adam<double, false, false>(at::kDouble, adam_of(false, false, write_grad));
  }
}

TEST_CASE("the same for SGD with and without momentum") {
  if (!cpu_fuses()) {
    SUCCEED("this CPU rounds twice where a GPU rounds once");
    return;
  }
  const SgdScalars scalars = sgd_scalars({0.1, 0.9, 0, 0.1, true, true, false});
  const AdamTensors device = uneven(at::kFloat);
  const AdamTensors expected = device.clone();
  const auto table = table_of(device);
  const SgdFactors<float> factors = factors_of<float>(scalars);
  run_blocks<float, 1>(*table, SgdOp<Numbers, true, true, true, float>{factors, 1}, false);
  run_blocks<float, 0>(*table, SgdOp<Numbers, true, false, false, float>{factors, 1}, false);
  for (size_t i = 0; i < expected.params.size(); ++i) {
    OptimizerSegment segment = segment_of(expected, i);
    sgd_segment(segment, {at::kFloat, at::kFloat}, scalars);
    segment.exp_avg = nullptr;
    sgd_segment(segment, {at::kFloat, at::kFloat}, scalars);
    INFO("parameter " << i);
    CHECK(at::equal(device.params[i], expected.params[i]));
    CHECK(at::equal(device.exp_avgs[i], expected.exp_avgs[i]));
  }
}

TEST_CASE("an optimizer table gives segments whole blocks, and refuses one too many") {
  // numel    3         8192      empty     8193          2^33 + 5
  // blocks   0         1         -         2             4 ...
  auto table = std::make_unique<OptimizerTable>();
  clear(*table);
  char memory[64];
  const int64_t large = (int64_t{1} << 33) + 5;
  for (const int64_t numel : {int64_t{3}, int64_t{8192}, int64_t{0}, int64_t{8193}, large}) {
    REQUIRE(append(*table, {memory, memory, memory, memory, nullptr, numel}, nullptr));
  }
  CHECK(table->segments == 4);
  CHECK(std::vector<int32_t>(table->block_begin, table->block_begin + 4) ==
        std::vector<int32_t>{0, 1, 2, 4});
  const int32_t last = blocks_of(*table) - 1;
  CHECK(segment_of(*table, last) == 3);
  const auto chunk = chunk_of<float, float, float, 2>(*table, 3, last, false);
  CHECK(chunk.numel == 5);
  CHECK(reinterpret_cast<char*>(chunk.param) - memory == (int64_t{1} << 33) * 4);

  clear(*table);
  for (int i = 0; i < kTableSegments; ++i) {
    REQUIRE(append(*table, {memory, memory, memory, memory, nullptr, 1}, nullptr));
  }
  CHECK_FALSE(append(*table, {memory, memory, memory, memory, nullptr, 1}, nullptr));
  CHECK(append(*table, {memory, memory, memory, memory, nullptr, 0}, nullptr));
  CHECK(blocks_of(*table) == kTableSegments);
}

}  // namespace trireme::optimizer_table_test
