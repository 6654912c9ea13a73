#include <trireme/strategies/parameter_server/row_store.h>

#include <trireme/common/sanitizer_compat.h>
#include <trireme/common/spin.h>
#include <trireme/strategies/parameter_server/id_places.h>
#include <trireme/strategies/parameter_server/table_plan.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

// See the notes in row_store.h.

namespace trireme::ps {
namespace {

// The number of ids looked up side by side: while the memory of one is on its way, others are
// prefetched.
constexpr int64_t kSideBySide = 16;

constexpr int kLooksBeforeSleep = 200;
constexpr int kReadsBeforeTaking = 16;
constexpr int64_t kReservedAtOnce = int64_t{1} << 20;

int64_t holder_of(uint64_t word) { return static_cast<int64_t>(word & RowRecord::kHolderMask) - 1; }
uint64_t version_of(uint64_t word) { return word >> RowRecord::kVersionShift; }

}  // namespace

RowStore::RowStore(Parts parts, RowPlan plan, BlockLine& index_line)
    : spec_(std::move(parts.spec)),
      board_(std::move(parts.board)),
      segment_(std::move(parts.segment)),
      keeps_memory_(std::move(parts.keeps_memory)),
      plan_(plan),
      memory_(segment_->data()),
      index_line_(index_line),
      lock_(board_) {}

// --- memory --------------------------------------------------------------------------------------

void RowStore::reserve(int64_t begin, int64_t end, std::string_view what,
                       const WaitContext& context) const {
  std::string why_not;
  if (segment_->grow(begin, end, why_not)) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea,
                 c10::str(context.text(), ": got no memory for ", what, " beside ",
                          header().claimed.load(std::memory_order_relaxed), " rows: ", why_not),
                 board_->where(), "Free memory, or use fewer ids or workers."));
}

void RowStore::refuse_memory(std::string_view what, const WaitContext& context) const {
  C10_THROW_ERROR(DistBackendError,
                  error_text(kPsArea,
                             c10::str(context.text(), ": got no addresses for ", what, " beside ",
                                      header().claimed.load(std::memory_order_relaxed),
                                      " rows, which were planned for the memory of this machine"),
                             board_->where(), "Use fewer ids, or push less in one clock."));
}

int64_t RowStore::memory_bytes() const {
  return plan_.first_bytes() +
         static_cast<int64_t>(header().records_reserved.load(std::memory_order_relaxed) +
                              header().other_bytes.load(std::memory_order_relaxed));
}

Span RowStore::values(int64_t row) const {
  return {memory_ + plan_.record_at(row) + plan_.values_at, plan_.dtype, plan_.dim};
}

std::byte* RowStore::state(int64_t row, int64_t state) const {
  return memory_ + plan_.record_at(row) + plan_.states_at + state * plan_.state_bytes;
}

int64_t RowStore::count_step(int64_t row) const {
  return static_cast<int64_t>(++record(row).steps);
}

// --- the index -----------------------------------------------------------------------------------

int64_t RowStore::look_up(int64_t id, int64_t level) const {
  const IndexSlot* slots = slots_of(level);
  const size_t mask = static_cast<size_t>(RowPlan::slots_of(level)) - 1;
  for (size_t slot = hash_of(id) & mask;; slot = (slot + 1) & mask) {
    const uint64_t row = slots[slot].row.load(std::memory_order_acquire);
    if (row == 0) return kNone;
    if (slots[slot].id.load(std::memory_order_relaxed) == id) return static_cast<int64_t>(row) - 1;
  }
}

void RowStore::fetch(int64_t row, int64_t bytes) const {
  constexpr int64_t kMostFetched = 1024;
  const std::byte* record = memory_ + plan_.record_at(row);
  for (int64_t byte = 0; byte < std::min(bytes, kMostFetched); byte += 64)
    __builtin_prefetch(record + byte);
}

void RowStore::find(const int64_t* ids, int64_t count, int64_t* rows) const {
  for (int64_t begin = 0; begin < count; begin += kSideBySide) {
    const int64_t end = std::min(begin + kSideBySide, count);
    for (uint64_t level = header().level.load(std::memory_order_acquire);;) {
      const auto at_level = static_cast<int64_t>(level);
      const size_t mask = static_cast<size_t>(RowPlan::slots_of(at_level)) - 1;
      for (int64_t i = begin; i < end; ++i)
        __builtin_prefetch(slots_of(at_level) + (hash_of(ids[i]) & mask));
      bool any_missing = false;
      for (int64_t i = begin; i < end; ++i) {
        rows[i] = look_up(ids[i], at_level);
        any_missing = any_missing || rows[i] == kNone;
      }
      // A missing row may be in a next level that was published meanwhile.
      const uint64_t now = header().level.load(std::memory_order_acquire);
      if (!any_missing || now == level) break;
      level = now;
    }
  }
}

// Writes a row into an index that does not have it yet.
void RowStore::put(int64_t row, int64_t level) const {
  const int64_t id = record(row).id;
  IndexSlot* slots = slots_of(level);
  const size_t mask = static_cast<size_t>(RowPlan::slots_of(level)) - 1;
  size_t slot = hash_of(id) & mask;
  while (slots[slot].row.load(std::memory_order_relaxed) != 0) slot = (slot + 1) & mask;
  slots[slot].id.store(id, std::memory_order_relaxed);
  slots[slot].row.store(static_cast<uint64_t>(row) + 1, std::memory_order_release);
}

void RowStore::grow_index(const WaitContext& context) {
  const auto level = static_cast<int64_t>(header().level.load(std::memory_order_relaxed)) + 1;
  const int64_t bytes = RowPlan::slots_of(level) * RowPlan::kSlotBytes;
  reserve(plan_.level_at(level), plan_.level_at(level) + bytes, "the index", context);
  header().other_bytes.fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
  std::memset(static_cast<void*>(slots_of(level)), 0, static_cast<size_t>(bytes));
  const auto rows = static_cast<int64_t>(header().claimed.load(std::memory_order_relaxed));
  for (int64_t row = 0; row < rows; ++row)
    if (is_made(row)) put(row, level);
  header().level.store(static_cast<uint64_t>(level), std::memory_order_release);
}

int64_t RowStore::add(int64_t id, const WaitContext& context) {
  const auto row = static_cast<int64_t>(header().claimed.load(std::memory_order_relaxed));
  if (row >= plan_.most_rows) refuse_memory("one more row", context);
  const auto reserved =
      static_cast<int64_t>(header().records_reserved.load(std::memory_order_relaxed));
  if ((row + 1) * plan_.record_bytes > reserved) {
    const int64_t step = std::max({kReservedAtOnce, reserved / 8, plan_.record_bytes});
    const int64_t end = std::min(reserved + step, plan_.most_rows * plan_.record_bytes);
    reserve(plan_.records_at + reserved, plan_.records_at + end, "rows", context);
    header().records_reserved.store(static_cast<uint64_t>(end), std::memory_order_relaxed);
  }
  auto level = static_cast<int64_t>(header().level.load(std::memory_order_relaxed));
  if (2 * (row + 1) > RowPlan::slots_of(level)) {
    grow_index(context);
    ++level;
  }
  header().claimed.store(static_cast<uint64_t>(row + 1), std::memory_order_relaxed);
  record(row).id = id;
  fill_row(spec_->rows->init, spec_->rows->seed, id, values(row));
  put(row, level);
  record(row).word.fetch_or(RowRecord::kMade, std::memory_order_release);
  return row;
}

// Marks the last row as made if its maker died after it published the row and before it marked it.
void RowStore::finish_for_the_dead() const {
  const auto rows = static_cast<int64_t>(header().claimed.load(std::memory_order_relaxed));
  if (rows == 0) return;
  int64_t found = kNone;
  find(&record(rows - 1).id, 1, &found);
  if (found == rows - 1) record(found).word.fetch_or(RowRecord::kMade, std::memory_order_release);
}

void RowStore::make(const int64_t* ids, int64_t count, int64_t* rows, const WaitContext& context) {
  if (std::find(rows, rows + count, kNone) == rows + count) return;
  uint64_t before = 0;
  while (!lock_.try_acquire(index_line_, before)) {
    lock_.wait_for_holder(index_line_, context,
                          [&] { return "the index of table '" + spec_->name + "'"; });
  }
  const auto release = c10::make_scope_exit([this] { lock_.release(index_line_, 1); });
  if (before != 0) finish_for_the_dead();
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] != kNone) continue;
    find(ids + i, 1, rows + i);
    if (rows[i] == kNone) rows[i] = add(ids[i], context);
  }
}

int64_t RowStore::size() const {
  const int64_t rows = count_claimed();
  int64_t made = 0;
  for (int64_t row = 0; row < rows; ++row) made += is_made(row) ? 1 : 0;
  return made;
}

std::vector<int64_t> RowStore::ids() const {
  const int64_t rows = count_claimed();
  std::vector<int64_t> found;
  for (int64_t row = 0; row < rows; ++row)
    if (is_made(row)) found.push_back(record(row).id);
  std::sort(found.begin(), found.end());
  return found;
}

RowColumns RowStore::columns() const {
  const int64_t rows = count_claimed();
  std::byte* first = memory_ + plan_.records_at;
  const auto column = [&](std::byte* place, std::vector<int64_t> more, at::ScalarType dtype) {
    std::vector<int64_t> sizes = {rows};
    std::vector<int64_t> strides = {plan_.record_bytes /
                                    static_cast<int64_t>(c10::elementSize(dtype))};
    for (const int64_t size : more) {
      sizes.push_back(size);
      strides.push_back(1);
    }
    return at::from_blob(place, sizes, strides, dtype);
  };
  RowColumns all;
  all.ids = column(first + offsetof(RowRecord, id), {}, at::kLong);
  all.steps = column(first + offsetof(RowRecord, steps), {}, at::kLong);
  all.values = column(first + plan_.values_at, {plan_.dim}, plan_.dtype);
  const at::ScalarType dtype = optimizer_state_dtype(plan_.dtype);
  const int64_t numel = plan_.state_bytes / static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t i = 0; i < count_states(spec_->optimizer); ++i)
    all.states.push_back(column(first + plan_.states_at + i * plan_.state_bytes, {numel}, dtype));
  std::vector<int64_t> made;
  for (int64_t row = 0; row < rows; ++row)
    if (is_made(row)) made.push_back(row);
  if (static_cast<int64_t>(made.size()) == rows) return all;
  const at::Tensor which = at::tensor(made, at::kLong);
  for (at::Tensor* field : {&all.ids, &all.steps, &all.values})
    *field = field->index_select(0, which);
  for (at::Tensor& state : all.states) state = state.index_select(0, which);
  return all;
}

void RowStore::clear() {
  const auto rows = static_cast<int64_t>(header().claimed.load(std::memory_order_relaxed));
  const auto level = static_cast<int64_t>(header().level.load(std::memory_order_relaxed));
  std::memset(static_cast<void*>(slots_of(level)), 0,
              static_cast<size_t>(RowPlan::slots_of(level) * RowPlan::kSlotBytes));
  std::memset(memory_ + plan_.records_at, 0, static_cast<size_t>(rows * plan_.record_bytes));
  header().claimed.store(0, std::memory_order_release);
}

// --- rows ----------------------------------------------------------------------------------------

bool RowStore::is_lost(uint64_t holder) const {
  return board_->options().on_worker_loss == WorkerLoss::kContinue &&
         has_broken_off(board_->state_of(holder_of(holder)));
}

void RowStore::note_torn(int64_t id) const {
  const uint64_t torn = header().torn.fetch_add(1, std::memory_order_relaxed);
  header().torn_ids[torn % RowsHeader::kTornKept].store(id, std::memory_order_relaxed);
}

void RowStore::acquire(int64_t row, const WaitContext& context) const {
  std::atomic<uint64_t>& word = record(row).word;
  line(*board_->worker()).holding.store(static_cast<uint64_t>(row) + 1, std::memory_order_relaxed);
  uint64_t now = word.load(std::memory_order_relaxed);
  for (int looks = 0;; ++looks) {
    const bool is_free = (now & RowRecord::kHolderMask) == 0;
    if (is_free || is_lost(now)) {
      if (word.compare_exchange_weak(now, (now & ~RowRecord::kHolderMask) | me(),
                                     std::memory_order_acquire, std::memory_order_relaxed)) {
        // A reader that sees a write from here on also sees the holder in the word.
        std::atomic_thread_fence(std::memory_order_release);
        if (!is_free) note_torn(record(row).id);
        return;
      }
      continue;
    }
    if (looks < kLooksBeforeSleep) {
      spin_pause();
    } else {
      header().waiters.fetch_add(1, std::memory_order_seq_cst);
      const auto done = c10::make_scope_exit(
          [this] { header().waiters.fetch_sub(1, std::memory_order_relaxed); });
      board_->wait(
          word, (version_of(now) + 1) << RowRecord::kVersionShift,
          {[&] { return context.text() + ", at " + name_of(row); }, "lock", holder_of(now)});
    }
    now = word.load(std::memory_order_relaxed);
  }
}

void RowStore::release(int64_t row) const {
  std::atomic<uint64_t>& word = record(row).word;
  const uint64_t next = version_of(word.load(std::memory_order_relaxed)) + 1;
  word.store(next << RowRecord::kVersionShift | RowRecord::kMade, std::memory_order_seq_cst);
  if (header().waiters.load(std::memory_order_seq_cst) > 0) board_->ring_all();
}

void RowStore::read(int64_t row, std::byte* to, const WaitContext& context) const {
  const Span from = values(row);
  const size_t bytes = static_cast<size_t>(from.numel) * c10::elementSize(from.dtype);
  const std::atomic<uint64_t>& word = record(row).word;
  for (int reads = 0; !kThreadSanitizer && reads < kReadsBeforeTaking; ++reads) {
    const uint64_t before = word.load(std::memory_order_acquire);
    if ((before & RowRecord::kHolderMask) != 0) {
      spin_pause();
      continue;
    }
    std::memcpy(to, from.data, bytes);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (((word.load(std::memory_order_relaxed) ^ before) & ~RowRecord::kMade) == 0) return;
  }
  acquire(row, context);
  std::memcpy(to, from.data, bytes);
  release(row);
}

// --- pushes that wait for their clock ------------------------------------------------------------

int64_t RowStore::claim_push_memory(PushHalf& half, int64_t bytes,
                                    const WaitContext& context) const {
  bytes = in_lines(bytes);
  while (half.extent < half.extents && half.used + bytes > half.memory[half.extent].bytes) {
    ++half.extent;
    half.used = 0;
  }
  if (half.extent == half.extents) {
    if (half.extents == PushHalf::kExtents) refuse_memory("another push of this clock", context);
    // An extent that could not be reserved the last time is still this worker's.
    PushHalf::Extent& next = half.memory[half.extents];
    if (next.bytes < bytes) {
      int64_t has = 0;
      for (uint64_t i = 0; i < half.extents; ++i) has += half.memory[i].bytes;
      next.bytes = std::max({bytes, has, kReservedAtOnce / 4});
      next.begin =
          plan_.pushes_at + static_cast<int64_t>(header().push_bytes.fetch_add(
                                static_cast<uint64_t>(next.bytes), std::memory_order_relaxed));
    }
    if (next.begin + next.bytes > plan_.bytes) refuse_memory("a push", context);
    reserve(next.begin, next.begin + next.bytes, "a push", context);
    header().other_bytes.fetch_add(static_cast<uint64_t>(next.bytes), std::memory_order_relaxed);
    ++half.extents;
  }
  const int64_t offset = half.memory[half.extent].begin + half.used;
  half.used += bytes;
  return offset;
}

// --- faults --------------------------------------------------------------------------------------

std::string RowStore::name_of(int64_t row) const {
  return c10::str("row ", record(row).id, " of table '", spec_->name, "'");
}

std::string RowStore::held_by(int64_t worker) const {
  if (BlockLock::is_held_by(index_line_, worker))
    return " while it held the index of table '" + spec_->name + "'";
  const auto row = static_cast<int64_t>(line(worker).holding.load(std::memory_order_acquire)) - 1;
  if (row < 0 || holder_of(record(row).word.load(std::memory_order_acquire)) != worker) return {};
  return " while it held " + name_of(row);
}

int64_t RowStore::count_torn(std::vector<std::string>& names) const {
  const uint64_t torn = header().torn.load(std::memory_order_relaxed);
  for (size_t i = 0; i < std::min<uint64_t>(torn, RowsHeader::kTornKept); ++i)
    names.push_back(c10::str("row ", header().torn_ids[i].load(std::memory_order_relaxed),
                             " of table '", spec_->name, "'"));
  auto all = static_cast<int64_t>(torn);
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    if (!has_broken_off(board_->state_of(worker))) continue;
    const auto row = static_cast<int64_t>(line(worker).holding.load(std::memory_order_acquire)) - 1;
    if (row < 0 || holder_of(record(row).word.load(std::memory_order_acquire)) != worker) continue;
    names.push_back(name_of(row));
    ++all;
  }
  return all;
}

}  // namespace trireme::ps
