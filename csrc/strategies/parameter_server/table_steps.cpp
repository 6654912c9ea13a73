#include <trireme/strategies/parameter_server/table_steps.h>

#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <utility>

// See [Note: who steps a block] in table_steps.h.

namespace trireme::ps {
namespace {

// A holder's word: its number, and above that what it has done.
constexpr int kDoneShift = 16;
constexpr uint64_t kWorkerMask = (uint64_t{1} << kDoneShift) - 1;
int64_t worker_in(uint64_t holder) { return static_cast<int64_t>(holder & kWorkerMask) - 1; }
uint64_t done_in(uint64_t holder) { return holder >> kDoneShift; }

// Sums of so many elements are made at a time, in a buffer that stays in the nearest cache.
constexpr int64_t kSumNumel = 2048;

template <typename T>
void divide(void* sums, int64_t numel, int64_t divisor) {
  auto* values = static_cast<T*>(sums);
  const auto by = static_cast<T>(divisor);
  for (int64_t i = 0; i < numel; ++i) values[i] /= by;
}

// Adds up deposits in their order, from their first element on, into one buffer.
struct Deposits {
  std::vector<const std::byte*> data;
  at::ScalarType dtype;
  at::ScalarType computed;  // the buffer's

  void sum(std::byte* buffer, int64_t begin, int64_t end, int64_t divisor) const {
    const int64_t numel = end - begin;
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    const Span sums = {buffer, computed, numel};
    for (size_t i = 0; i < data.size(); ++i) {
      const ConstSpan one = {data[i] + begin * item, dtype, numel};
      i == 0 ? scaled_copy(sums, one, 1.0) : scaled_add(sums, one, 1.0);
    }
    if (divisor == 1) return;
    computed == at::kDouble ? divide<double>(buffer, numel, divisor)
                            : divide<float>(buffer, numel, divisor);
  }
};

}  // namespace

TableSteps::TableSteps(Parts parts, TablePlan plan)
    : spec_(std::move(parts.spec)),
      board_(std::move(parts.board)),
      store_(std::move(parts.store)),
      keeps_memory_(std::move(parts.keeps_memory)),
      plan_(std::move(plan)),
      memory_(plan_, parts.memory) {
  for (int64_t tensor = 0; tensor < plan_.tensors; ++tensor)
    values_.push_back(store_->whole(tensor));
}

// Counts this worker among those that a holder wakes.
class TableSteps::Waiting {
 public:
  explicit Waiting(BlockLine& line) : line_(line) {
    line_.waiters.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Waiting() { line_.waiters.fetch_sub(1, std::memory_order_relaxed); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  BlockLine& line_;
};

// Takes a block that nobody holds, or whose holder has died where the others go on. `holder`: the
// word that was there.
bool TableSteps::take(BlockLine& line, uint64_t& holder) {
  holder = 0;
  if (line.holder.compare_exchange_strong(holder, me(), std::memory_order_seq_cst)) return true;
  return board_->options().on_worker_loss == WorkerLoss::kContinue &&
         board_->state_of(worker_in(holder)) == LineState::kLost &&
         line.holder.compare_exchange_strong(holder, me(), std::memory_order_seq_cst);
}

void TableSteps::let_go(BlockLine& line, uint64_t done) {
  line.holder.store(done << kDoneShift | me(), std::memory_order_seq_cst);
  if (board_->options().mode == Mode::kBsp) line.applied.store(done, std::memory_order_seq_cst);
  line.holder.store(0, std::memory_order_seq_cst);
  line.released.fetch_add(1, std::memory_order_seq_cst);
  if (line.waiters.load(std::memory_order_seq_cst) > 0) board_->ring_all();
}

// Returns when the holder has let go, or is gone.
void TableSteps::wait_for_holder(int64_t block, const Errand& errand) {
  BlockLine& line = memory_.block(block);
  const Waiting waiting(line);
  const uint64_t released = line.released.load(std::memory_order_seq_cst);
  const uint64_t holder = line.holder.load(std::memory_order_seq_cst);
  if (holder == 0) return;
  const int64_t worker = worker_in(holder);
  board_->wait(line.released, released + 1,
               {[&] { return errand.text() + ", at " + name_of(block); }, "lock", worker});
}

OptimizerSegment TableSteps::segment_of(int64_t block) const {
  const TableBlock& one = plan_.blocks[static_cast<size_t>(block)];
  const at::Tensor& values = values_[static_cast<size_t>(one.tensor)];
  const auto item = static_cast<int64_t>(values.element_size());
  const auto state_item =
      static_cast<int64_t>(c10::elementSize(optimizer_state_dtype(values.scalar_type())));
  const auto state = [&](int64_t index) -> void* {
    return memory_.state(index, one.tensor) + one.begin * state_item;
  };
  OptimizerSegment segment;
  segment.param = static_cast<std::byte*>(values.data_ptr()) + one.begin * item;
  segment.numel = one.numel;
  const int64_t states = count_states(spec_->optimizer);
  if (std::holds_alternative<AdagradSpec>(spec_->optimizer)) {
    segment.exp_avg_sq = state(0);
  } else {
    if (states > 0) segment.exp_avg = state(0);
    if (states > 1) segment.exp_avg_sq = state(1);
  }
  return segment;
}

// --- bsp -----------------------------------------------------------------------------------------

TableSteps::ClockStep TableSteps::step_of(uint64_t clock) const {
  ClockStep step;
  step.clock = clock;
  step.lr = learning_rate_of(spec_->optimizer);
  uint64_t since = 0;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    const bool taken = board_->takes(worker, clock);
    if (taken) step.taken.push_back(worker);
    if (!taken && !board_->is_gone(worker)) continue;
    // The latest one that a worker has set counts; of several workers the first. Who has clocked
    // has put what holds for that clock into its place; who has gone has left it in one of both.
    for (uint64_t place = 0; place < 2; ++place) {
      if (taken && place != (clock & 1)) continue;
      const LearningRate& one = memory_.marks(worker).lr[place];
      const uint64_t its = one.since.load(std::memory_order_acquire);
      if (its <= since || its > clock + 1) continue;
      since = its;
      step.lr = one.value.load(std::memory_order_relaxed);
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
    // It is a later clock's where this worker has slept over what it wanted to do.
    if (its_clock != first && its_clock != before) return count_blocks();
    const uint64_t next = its_clock == first ? word : first;
    const auto block = static_cast<int64_t>(next - first);
    if (block >= count_blocks()) return count_blocks();
    if (claims.compare_exchange_weak(word, next + 1, std::memory_order_relaxed)) return block;
  }
}

void TableSteps::step_block(int64_t block, const ClockStep& step) {
  const TableBlock& one = plan_.blocks[static_cast<size_t>(block)];
  const at::ScalarType dtype = values_[static_cast<size_t>(one.tensor)].scalar_type();
  Deposits deposits{{}, dtype, optimizer_state_dtype(dtype)};
  const auto skip = one.begin * static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t worker : step.taken) {
    if (memory_.deposited(worker, step.clock, one.tensor).load(std::memory_order_relaxed) ==
        step.clock + 1)
      deposits.data.push_back(memory_.deposit(worker, step.clock, one.tensor) + skip);
  }
  if (deposits.data.empty()) return;
  BlockLine& line = memory_.block(block);
  const uint64_t number = line.steps.load(std::memory_order_relaxed) + 1;
  line.steps.store(number, std::memory_order_relaxed);
  const SegmentDtypes dtypes = {dtype, deposits.computed};
  const OptimizerSegment whole = segment_of(block);
  alignas(64) std::array<std::byte, kSumNumel * sizeof(double)> sums;
  for (int64_t begin = 0; begin < one.numel; begin += kSumNumel) {
    const int64_t end = std::min(begin + kSumNumel, one.numel);
    deposits.sum(sums.data(), begin, end, step.divisor);
    OptimizerSegment segment = slice(whole, dtypes, begin, end);
    segment.grad = sums.data();
    step_segment(spec_->optimizer, segment, dtypes, {step.lr, static_cast<int64_t>(number), 1});
  }
}

// Returns false where another worker is at that block.
bool TableSteps::try_apply(int64_t block, const ClockStep& step) {
  BlockLine& line = memory_.block(block);
  uint64_t before = 0;
  if (!take(line, before)) return false;
  const uint64_t applied = line.applied.load(std::memory_order_acquire);
  const bool is_behind = applied == step.clock;
  if (before != 0 && done_in(before) == 0) {
    line.torn.fetch_add(1, std::memory_order_relaxed);
  } else if (is_behind && done_in(before) != step.clock + 1) {
    step_block(block, step);
  }
  let_go(line, is_behind ? step.clock + 1 : applied);
  return true;
}

// Returns false where it would have to wait for another worker, and has no errand.
bool TableSteps::apply(uint64_t clock, const Errand* errand) {
  TRIREME_TRACE("ps.apply");
  const ClockStep step = step_of(clock);
  for (int64_t block = claim(clock); block < count_blocks(); block = claim(clock))
    try_apply(block, step);
  for (int64_t block = 0; block < count_blocks(); ++block) {
    while (memory_.block(block).applied.load(std::memory_order_acquire) <= clock) {
      if (try_apply(block, step)) break;
      if (errand == nullptr) return false;
      wait_for_holder(block, *errand);
    }
  }
  std::atomic<uint64_t>& applied = memory_.header().applied;
  uint64_t before = clock;
  applied.compare_exchange_strong(before, clock + 1, std::memory_order_seq_cst);
  return true;
}

void TableSteps::bring_to(uint64_t clocks, const Errand& errand) {
  for (uint64_t now = applied(); now < clocks; now = applied()) {
    if (board_->closed() <= now) board_->close_clocks();
    if (board_->closed() > now) {
      apply(now, &errand);
    } else {
      board_->wait_closed(now + 1, errand);
    }
  }
}

void TableSteps::apply_closed() {
  for (uint64_t now = applied(); now < board_->closed(); now = applied())
    if (!apply(now, nullptr)) return;
}

void TableSteps::deposit(const std::vector<at::Tensor>& gradients, double scale) {
  const int64_t own = *board_->worker();
  const uint64_t clock = board_->clock();
  for (int64_t tensor = 0; tensor < plan_.tensors; ++tensor) {
    const at::Tensor& gradient = gradients[static_cast<size_t>(tensor)];
    if (!gradient.defined()) continue;
    const at::Tensor& values = values_[static_cast<size_t>(tensor)];
    const Span place = {memory_.deposit(own, clock, tensor), values.scalar_type(), values.numel()};
    std::atomic<uint64_t>& mark = memory_.deposited(own, clock, tensor);
    const bool is_first = mark.load(std::memory_order_relaxed) != clock + 1;
    const Span from = span_of(gradient);
    is_first ? scaled_copy(place, from, scale) : scaled_add(place, from, scale);
    mark.store(clock + 1, std::memory_order_relaxed);
  }
}

void TableSteps::carry_learning_rate(const Errand& errand) {
  const uint64_t clock = board_->clock();
  if (lr_since_ == 0) return;
  // What the half held may still be wanted by who applies the clock before the last one.
  if (lr_since_ + 1 >= clock && clock > 1) bring_to(clock - 1, errand);
  LearningRate& place = memory_.marks(*board_->worker()).lr[clock & 1];
  place.value.store(lr_, std::memory_order_relaxed);
  place.since.store(lr_since_, std::memory_order_release);
}

// --- ssp and async -------------------------------------------------------------------------------

void TableSteps::step_now(const std::vector<at::Tensor>& gradients, double scale,
                          const Errand& errand) {
  const TableHeader& header = memory_.header();
  const double lr = header.lr_is_set.load(std::memory_order_acquire) != 0
                        ? header.lr.load(std::memory_order_relaxed)
                        : learning_rate_of(spec_->optimizer);
  const int64_t first = *board_->worker() * count_blocks() / board_->workers();
  for (int64_t i = 0; i < count_blocks(); ++i) {
    const int64_t block = (first + i) % count_blocks();
    const TableBlock& one = plan_.blocks[static_cast<size_t>(block)];
    const at::Tensor& gradient = gradients[static_cast<size_t>(one.tensor)];
    if (!gradient.defined()) continue;
    BlockLine& line = memory_.block(block);
    uint64_t before = 0;
    while (!take(line, before)) wait_for_holder(block, errand);
    if (before != 0 && done_in(before) == 0) line.torn.fetch_add(1, std::memory_order_relaxed);
    const uint64_t number = line.steps.load(std::memory_order_relaxed) + 1;
    line.steps.store(number, std::memory_order_relaxed);
    OptimizerSegment segment = segment_of(block);
    segment.grad = static_cast<std::byte*>(gradient.data_ptr()) +
                   one.begin * static_cast<int64_t>(gradient.element_size());
    const SegmentDtypes dtypes = {values_[static_cast<size_t>(one.tensor)].scalar_type(),
                                  gradient.scalar_type()};
    step_segment(spec_->optimizer, segment, dtypes, {lr, static_cast<int64_t>(number), scale});
    let_go(line, 1);
  }
}

void TableSteps::set_learning_rate(double lr, const Errand& errand) {
  if (board_->options().mode == Mode::kBsp) {
    const uint64_t clock = board_->clock();
    if (clock > 0) bring_to(clock - 1, errand);
    lr_ = lr;
    lr_since_ = clock + 1;
    return;
  }
  memory_.header().lr.store(lr, std::memory_order_relaxed);
  memory_.header().lr_is_set.store(1, std::memory_order_release);
}

// --- faults --------------------------------------------------------------------------------------

std::string TableSteps::name_of(int64_t block) const {
  const TableBlock& one = plan_.blocks[static_cast<size_t>(block)];
  return c10::str("block ", block, " of table '", spec_->name, "' ('",
                  spec_->names[static_cast<size_t>(one.tensor)], "')");
}

std::string TableSteps::held_by(int64_t worker) const {
  for (int64_t block = 0; block < count_blocks(); ++block) {
    const uint64_t holder = memory_.block(block).holder.load(std::memory_order_acquire);
    if (worker_in(holder) == worker && done_in(holder) == 0)
      return " while it held " + name_of(block);
  }
  return {};
}

int64_t TableSteps::count_torn(std::vector<std::string>& names) const {
  int64_t torn = 0;
  for (int64_t block = 0; block < count_blocks(); ++block) {
    const BlockLine& line = memory_.block(block);
    const uint64_t holder = line.holder.load(std::memory_order_acquire);
    const bool is_held = holder != 0 && done_in(holder) == 0 &&
                         board_->state_of(worker_in(holder)) == LineState::kLost;
    const auto here =
        static_cast<int64_t>(line.torn.load(std::memory_order_relaxed)) + (is_held ? 1 : 0);
    if (here > 0) names.push_back(name_of(block));
    torn += here;
  }
  return torn;
}

}  // namespace trireme::ps
