#include <trireme/strategies/parameter_server/table_steps.h>

#include <trireme/common/trace.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: who steps a block] in table_steps.h.

namespace trireme::ps {
namespace {

template <typename T>
void divide_by(void* sums, int64_t numel, int64_t divisor) {
  auto* values = static_cast<T*>(sums);
  const auto by = static_cast<T>(divisor);
  for (int64_t i = 0; i < numel; ++i) values[i] /= by;
}

}  // namespace

TableSteps::TableSteps(Parts parts, TablePlan plan)
    : spec_(std::move(parts.spec)),
      board_(std::move(parts.board)),
      keeps_memory_(std::move(parts.keeps_memory)),
      plan_(std::move(plan)),
      memory_(plan_, parts.memory),
      lock_(board_) {}

TableSteps::~TableSteps() = default;

void TableSteps::wait_for_holder(int64_t block, const WaitContext& context) const {
  lock_.wait_for_holder(memory_.block(block), context, [&] { return name_of(block); });
}

void TableSteps::take_block(int64_t block, const WaitContext& context) {
  BlockLine& line = memory_.block(block);
  uint64_t before = 0;
  while (!lock_.try_acquire(line, before)) wait_for_holder(block, context);
  if (before != 0 && BlockLock::done_in(before) == 0)
    line.torn.fetch_add(1, std::memory_order_relaxed);
}

void TableSteps::divide(Span sums, int64_t divisor) {
  sums.dtype == at::kDouble ? divide_by<double>(sums.data, sums.numel, divisor)
                            : divide_by<float>(sums.data, sums.numel, divisor);
}

// --- bsp -----------------------------------------------------------------------------------------

TableSteps::ClockStep TableSteps::step_of(uint64_t clock) const {
  ClockStep step;
  step.clock = clock;
  step.lr = learning_rate_now();
  uint64_t since = 0;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    const bool taken = board_->takes(worker, clock);
    if (taken) step.taken.push_back(worker);
    if (!taken && !board_->is_gone(worker)) continue;
    // The rate set last counts; of several workers' the first. A worker that has clocked has put
    // its rate for that clock into the clock's place; one that is gone has left it in either place.
    for (uint64_t place = 0; place < 2; ++place) {
      if (taken && place != (clock & 1)) continue;
      const LearningRate& rate = memory_.marks(worker).lr[place];
      const uint64_t its = rate.since.load(std::memory_order_acquire);
      if (its <= since || its > clock + 1) continue;
      since = its;
      step.lr = rate.value.load(std::memory_order_relaxed);
    }
  }
  if (spec_->options.reduction == Reduction::kMean)
    step.divisor = std::max<int64_t>(1, static_cast<int64_t>(step.taken.size()));
  return step;
}

int64_t TableSteps::claim(uint64_t clock) {
  constexpr int kClockShift = 32;
  std::atomic<uint64_t>& claims = memory_.header().claims;
  uint64_t word = claims.load(std::memory_order_relaxed);
  const uint64_t first = (clock + 1) << kClockShift;
  const uint64_t before = clock << kClockShift;
  for (;;) {
    const uint64_t its_clock = word >> kClockShift << kClockShift;
    // The counter is of a later clock if this worker slept while others applied this one.
    if (its_clock != first && its_clock != before) return count_blocks();
    const uint64_t next = its_clock == first ? word : first;
    const auto block = static_cast<int64_t>(next - first);
    if (block >= count_blocks()) return count_blocks();
    if (claims.compare_exchange_weak(word, next + 1, std::memory_order_relaxed)) return block;
  }
}

// Applies a clock to a block; returns false if another worker holds it.
bool TableSteps::try_apply(int64_t block, const ClockStep& step) {
  BlockLine& line = memory_.block(block);
  uint64_t before = 0;
  if (!lock_.try_acquire(line, before)) return false;
  const uint64_t done = BlockLock::done_in(before);
  const uint64_t applied = line.applied.load(std::memory_order_acquire);
  const bool is_behind = applied == step.clock;
  if (before != 0 && done == 0) {
    line.torn.fetch_add(1, std::memory_order_relaxed);
  } else if (is_behind && done != step.clock + 1) {
    step_block(block, step);
  }
  lock_.release(line, is_behind ? step.clock + 1 : applied);
  return true;
}

// Applies a clock to all blocks; returns false if it has no context and would have to wait for
// another worker.
bool TableSteps::apply(uint64_t clock, const WaitContext* context) {
  TRIREME_TRACE("ps.apply");
  const ClockStep step = step_of(clock);
  for (int64_t block = claim(clock); block < count_blocks(); block = claim(clock))
    try_apply(block, step);
  for (int64_t block = 0; block < count_blocks(); ++block) {
    while (memory_.block(block).applied.load(std::memory_order_acquire) <= clock) {
      if (try_apply(block, step)) break;
      if (context == nullptr) return false;
      wait_for_holder(block, *context);
    }
  }
  std::atomic<uint64_t>& applied = memory_.header().applied;
  uint64_t before = clock;
  applied.compare_exchange_strong(before, clock + 1, std::memory_order_seq_cst);
  return true;
}

void TableSteps::bring_to(uint64_t clocks, const WaitContext& context) {
  for (uint64_t now = applied(); now < clocks; now = applied()) {
    if (board_->committed() <= now) board_->commit_clocks();
    if (board_->committed() > now) {
      apply(now, &context);
    } else {
      WaitContext open = context;
      open.lets_others_in = true;
      board_->wait_committed(now + 1, open);
    }
  }
}

void TableSteps::apply_committed() {
  for (uint64_t now = applied(); now < board_->committed(); now = applied())
    if (!apply(now, nullptr)) return;
}

void TableSteps::carry_learning_rate(const WaitContext& context) {
  if (lr_since_ == 0) return;
  uint64_t clock = 0;
  do {
    clock = board_->clock();
    // A worker that applies the clock before the last one may still need the rate in this place.
    if (lr_since_ + 1 >= clock && clock > 1) bring_to(clock - 1, context);
  } while (board_->clock() != clock);
  LearningRate& place = memory_.marks(*board_->worker()).lr[clock & 1];
  place.value.store(lr_, std::memory_order_relaxed);
  place.since.store(lr_since_, std::memory_order_release);
}

// --- learning rates ------------------------------------------------------------------------------

double TableSteps::learning_rate_now() const {
  const TableHeader& header = memory_.header();
  return header.lr_is_set.load(std::memory_order_acquire) != 0
             ? header.lr.load(std::memory_order_relaxed)
             : learning_rate_of(spec_->optimizer);
}

void TableSteps::adopt_learning_rate() {
  double lr = learning_rate_now();
  uint64_t since = 0;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    for (const LearningRate& rate : memory_.marks(worker).lr) {
      const uint64_t its = rate.since.load(std::memory_order_acquire);
      if (its <= since) continue;
      since = its;
      lr = rate.value.load(std::memory_order_relaxed);
    }
  }
  set_learning_rate_of_all(lr);
}

at::Tensor TableSteps::learning_rate() const {
  return at::from_blob(&memory_.header().lr, {}, at::kDouble);
}

void TableSteps::set_learning_rate_of_all(double lr) {
  memory_.header().lr.store(lr, std::memory_order_relaxed);
  memory_.header().lr_is_set.store(1, std::memory_order_release);
}

void TableSteps::forget_learning_rate() {
  lr_since_ = 0;
  for (LearningRate& rate : memory_.marks(*board_->worker()).lr)
    rate.since.store(0, std::memory_order_release);
}

void TableSteps::set_learning_rate(double lr, const WaitContext& context) {
  if (board_->options().mode == Mode::kBsp) {
    uint64_t clock = 0;
    do {
      clock = board_->clock();
      if (clock > 0) bring_to(clock - 1, context);
    } while (board_->clock() != clock);
    lr_ = lr;
    lr_since_ = clock + 1;
    return;
  }
  set_learning_rate_of_all(lr);
}

// --- faults --------------------------------------------------------------------------------------

std::string TableSteps::held_by(int64_t worker) const {
  for (int64_t block = 0; block < count_blocks(); ++block)
    if (BlockLock::is_held_by(memory_.block(block), worker))
      return " while it held " + name_of(block);
  return {};
}

int64_t TableSteps::count_torn(std::vector<std::string>& names) const {
  int64_t torn = 0;
  for (int64_t block = 0; block < count_blocks(); ++block) {
    const BlockLine& line = memory_.block(block);
    const auto here = static_cast<int64_t>(line.torn.load(std::memory_order_relaxed)) +
                      (lock_.is_torn(line) ? 1 : 0);
    if (here > 0) names.push_back(name_of(block));
    torn += here;
  }
  return torn;
}

}  // namespace trireme::ps
