#include <trireme/strategies/parameter_server/dense_steps.h>

#include <trireme/kernels/optimizer_step.h>
#include <trireme/kernels/span.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <utility>

// See [Note: who steps a block] in table_steps.h.

namespace trireme::ps {
namespace {

// The number of elements summed at a time, in a buffer that stays in the nearest cache.
constexpr int64_t kSumNumel = 2048;

// The deposits of one block, which are added up in their order into one buffer.
struct Deposits {
  std::vector<const std::byte*> data;
  at::ScalarType dtype;
  at::ScalarType computed;  // the buffer's

  void sum(std::byte* buffer, int64_t begin, int64_t end) const {
    const int64_t numel = end - begin;
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    const Span sums = {buffer, computed, numel};
    for (size_t i = 0; i < data.size(); ++i) {
      const ConstSpan addend = {data[i] + begin * item, dtype, numel};
      i == 0 ? scaled_copy(sums, addend, 1.0) : scaled_add(sums, addend, 1.0);
    }
  }
};

}  // namespace

DenseSteps::DenseSteps(Parts parts, TablePlan plan, std::shared_ptr<HostStore> store)
    : TableSteps(std::move(parts), std::move(plan)), store_(std::move(store)) {
  for (int64_t tensor = 0; tensor < this->plan().tensors; ++tensor)
    values_.push_back(store_->whole(tensor));
}

OptimizerSegment DenseSteps::segment_of(int64_t block) const {
  const TableBlock& part = plan().blocks[static_cast<size_t>(block)];
  const at::Tensor& values = values_[static_cast<size_t>(part.tensor)];
  const auto item = static_cast<int64_t>(values.element_size());
  const auto state_item =
      static_cast<int64_t>(c10::elementSize(optimizer_state_dtype(values.scalar_type())));
  const auto state = [&](int64_t index) -> void* {
    return memory().state(index, part.tensor) + part.begin * state_item;
  };
  OptimizerSegment segment;
  segment.param = static_cast<std::byte*>(values.data_ptr()) + part.begin * item;
  segment.numel = part.numel;
  set_states(segment, spec().optimizer, state);
  return segment;
}

at::Tensor DenseSteps::state(int64_t state, int64_t tensor) const {
  const at::Tensor& values = values_[static_cast<size_t>(tensor)];
  return at::from_blob(memory().state(state, tensor), values.sizes(),
                       optimizer_state_dtype(values.scalar_type()));
}

at::Tensor DenseSteps::step_counts(int64_t tensor) const {
  const auto is_its = [&](const TableBlock& block) { return block.tensor == tensor; };
  const auto first = std::find_if(plan().blocks.begin(), plan().blocks.end(), is_its);
  const int64_t count = std::count_if(first, plan().blocks.end(), is_its);
  if (count == 0) return at::empty({0}, at::kLong);
  constexpr int64_t kStride = sizeof(BlockLine) / sizeof(uint64_t);
  return at::from_blob(&memory().block(first - plan().blocks.begin()).steps, {count}, {kStride},
                       at::kLong);
}

// Counts a step of a block and returns its number.
int64_t DenseSteps::count_step(int64_t block) {
  std::atomic<uint64_t>& steps = memory().block(block).steps;
  const uint64_t number = steps.load(std::memory_order_relaxed) + 1;
  steps.store(number, std::memory_order_relaxed);
  return static_cast<int64_t>(number);
}

void DenseSteps::step_block(int64_t block, const ClockStep& step) {
  const TableBlock& part = plan().blocks[static_cast<size_t>(block)];
  const at::ScalarType dtype = values_[static_cast<size_t>(part.tensor)].scalar_type();
  Deposits deposits{{}, dtype, optimizer_state_dtype(dtype)};
  const auto skip = part.begin * static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t worker : step.taken) {
    if (memory().deposited(worker, step.clock, part.tensor).load(std::memory_order_relaxed) ==
        step.clock + 1)
      deposits.data.push_back(memory().deposit(worker, step.clock, part.tensor) + skip);
  }
  if (deposits.data.empty()) return;
  const int64_t number = count_step(block);
  const SegmentDtypes dtypes = {dtype, deposits.computed};
  const OptimizerSegment whole = segment_of(block);
  alignas(64) std::array<std::byte, kSumNumel * sizeof(double)> sums;
  for (int64_t begin = 0; begin < part.numel; begin += kSumNumel) {
    const int64_t end = std::min(begin + kSumNumel, part.numel);
    deposits.sum(sums.data(), begin, end);
    if (step.divisor != 1) divide({sums.data(), deposits.computed, end - begin}, step.divisor);
    OptimizerSegment segment = slice(whole, dtypes, begin, end);
    segment.grad = sums.data();
    step_segment(spec().optimizer, segment, dtypes, {step.lr, number, 1});
  }
}

void DenseSteps::deposit(const std::vector<at::Tensor>& gradients, double scale) {
  const int64_t own = *board().worker();
  const uint64_t clock = board().clock();
  for (int64_t tensor = 0; tensor < plan().tensors; ++tensor) {
    const at::Tensor& gradient = gradients[static_cast<size_t>(tensor)];
    if (!gradient.defined()) continue;
    const at::Tensor& values = values_[static_cast<size_t>(tensor)];
    const Span place = {memory().deposit(own, clock, tensor), values.scalar_type(), values.numel()};
    std::atomic<uint64_t>& mark = memory().deposited(own, clock, tensor);
    const bool is_first = mark.load(std::memory_order_relaxed) != clock + 1;
    const Span from = span_of(gradient);
    is_first ? scaled_copy(place, from, scale) : scaled_add(place, from, scale);
    mark.store(clock + 1, std::memory_order_relaxed);
  }
}

void DenseSteps::forget_deposit() {
  for (int64_t tensor = 0; tensor < plan().tensors; ++tensor)
    memory()
        .deposited(*board().worker(), board().clock(), tensor)
        .store(0, std::memory_order_relaxed);
}

void DenseSteps::step_now(const std::vector<at::Tensor>& gradients, double scale,
                          const WaitContext& context) {
  const double lr = learning_rate_now();
  const int64_t first = *board().worker() * count_blocks() / board().workers();
  for (int64_t i = 0; i < count_blocks(); ++i) {
    const int64_t block = (first + i) % count_blocks();
    const TableBlock& part = plan().blocks[static_cast<size_t>(block)];
    const at::Tensor& gradient = gradients[static_cast<size_t>(part.tensor)];
    if (!gradient.defined()) continue;
    take_block(block, context);
    OptimizerSegment segment = segment_of(block);
    segment.grad = static_cast<std::byte*>(gradient.data_ptr()) +
                   part.begin * static_cast<int64_t>(gradient.element_size());
    const SegmentDtypes dtypes = {values_[static_cast<size_t>(part.tensor)].scalar_type(),
                                  gradient.scalar_type()};
    step_segment(spec().optimizer, segment, dtypes, {lr, count_step(block), scale});
    lock().release(memory().block(block), 1);
  }
}

std::string DenseSteps::name_of(int64_t block) const {
  const TableBlock& part = plan().blocks[static_cast<size_t>(block)];
  return c10::str("block ", block, " of table '", spec().name, "' ('",
                  spec().names[static_cast<size_t>(part.tensor)], "')");
}

}  // namespace trireme::ps
