#include <trireme/strategies/parameter_server/sparse_steps.h>

#include <trireme/kernels/optimizer_step.h>
#include <trireme/kernels/span.h>

#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <utility>

// See [Note: who steps a block] in table_steps.h.

namespace trireme::ps {
namespace {

// The number of rows prefetched before they are stepped.
constexpr int64_t kAhead = 8;

}  // namespace

SparseSteps::SparseSteps(Parts parts, TablePlan plan, RowStore::Parts rows, RowPlan row_plan)
    : TableSteps(std::move(parts), std::move(plan)),
      rows_(std::move(rows), row_plan, memory().block(kShares)),
      computed_(optimizer_state_dtype(row_plan.dtype)),
      sums_(row_plan.dim, computed_),
      own_(row_plan.dim, computed_) {}

void SparseSteps::find_or_make(const int64_t* ids, int64_t count, const WaitContext& context) {
  found_.resize(static_cast<size_t>(count));
  rows_.find(ids, count, found_.data());
  rows_.make(ids, count, found_.data(), context);
}

// Steps a row that this worker holds, or that no other worker can step.
void SparseSteps::step_row(int64_t row, ConstSpan gradient, double lr, double scale) {
  const Span values = rows_.values(row);
  OptimizerSegment segment;
  segment.param = values.data;
  segment.grad = const_cast<void*>(gradient.data);  // no optimizer step writes the gradient
  segment.numel = values.numel;
  set_states(segment, spec().optimizer, [&](int64_t state) { return rows_.state(row, state); });
  step_segment(spec().optimizer, segment, {values.dtype, gradient.dtype},
               {lr, rows_.count_step(row), scale});
}

void SparseSteps::step_now(const RowSums& pushed, double scale, const WaitContext& context) {
  const double lr = learning_rate_now();
  find_or_make(pushed.ids().data(), pushed.size(), context);
  for (int64_t i = 0; i < pushed.size(); ++i) {
    if (i + kAhead < pushed.size()) rows_.fetch_record(found_[static_cast<size_t>(i + kAhead)]);
    const int64_t row = found_[static_cast<size_t>(i)];
    rows_.acquire(row, context);
    const auto release = c10::make_scope_exit([&] { rows_.release(row); });
    step_row(row, pushed.row(i), lr, scale);
  }
}

// --- bsp -----------------------------------------------------------------------------------------

// Returns where the gradients of a kept push begin, behind its rows.
int64_t SparseSteps::gradients_in(int64_t count) const {
  return in_lines(static_cast<int64_t>(sizeof(Kept)) +
                  count * static_cast<int64_t>(sizeof(int64_t)));
}

void SparseSteps::deposit(const RowSums& pushed, double scale, const WaitContext& context) {
  const uint64_t clock = board().clock();
  const int64_t count = pushed.size();
  const int64_t dim = rows_.plan().dim;
  const auto item = static_cast<int64_t>(c10::elementSize(computed_));
  find_or_make(pushed.ids().data(), count, context);
  PushHalf& half = rows_.half(*board().worker(), clock);
  if (half.clock != clock + 1) {
    half.pushes = 0;
    half.extent = 0;
    half.used = 0;
    half.clock = clock + 1;
  }
  const int64_t offset =
      rows_.claim_push_memory(half, gradients_in(count) + count * dim * item, context);
  auto& kept = *reinterpret_cast<Kept*>(rows_.at(offset));
  kept = {0, count, {}};
  for (const int64_t row : found_) ++kept.begins[static_cast<size_t>(row % kShares) + 1];
  for (size_t share = 0; share < kShares; ++share) kept.begins[share + 1] += kept.begins[share];
  std::array<int64_t, kShares + 1> next = kept.begins;
  auto* rows = reinterpret_cast<int64_t*>(&kept + 1);
  std::byte* gradients = rows_.at(offset) + gradients_in(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = found_[static_cast<size_t>(i)];
    const int64_t place = next[static_cast<size_t>(row % kShares)]++;
    rows[place] = row;
    scaled_copy({gradients + place * dim * item, computed_, dim}, pushed.row(i), scale);
  }
  if (half.pushes++ == 0) {
    half.first = offset;
  } else {
    reinterpret_cast<Kept*>(rows_.at(half.last))->next = offset;
  }
  half.last = offset;
}

void SparseSteps::forget_deposit() { rows_.half(*board().worker(), board().clock()).clock = 0; }

void SparseSteps::add_share(const Kept& kept, int64_t share, RowSums& sums) const {
  const auto* rows = reinterpret_cast<const int64_t*>(&kept + 1);
  const int64_t dim = rows_.plan().dim;
  const auto item = static_cast<int64_t>(c10::elementSize(computed_));
  const std::byte* gradients = reinterpret_cast<const std::byte*>(&kept) + gradients_in(kept.count);
  for (int64_t i = kept.begins[static_cast<size_t>(share)];
       i < kept.begins[static_cast<size_t>(share) + 1]; ++i)
    sums.add(rows[i], {gradients + i * dim * item, computed_, dim});
}

void SparseSteps::step_block(int64_t share, const ClockStep& step) {
  const auto first_of = [&](int64_t worker) -> const Kept* {
    const PushHalf& half = rows_.half(worker, step.clock);
    const bool has_pushed = half.clock == step.clock + 1 && half.pushes > 0;
    return has_pushed ? reinterpret_cast<const Kept*>(rows_.at(half.first)) : nullptr;
  };
  const auto after = [&](const Kept* kept) {
    return kept->next == 0 ? nullptr : reinterpret_cast<const Kept*>(rows_.at(kept->next));
  };
  const auto most_of = [&](const Kept* first) {
    int64_t most = 0;
    for (const Kept* kept = first; kept != nullptr; kept = after(kept))
      most +=
          kept->begins[static_cast<size_t>(share) + 1] - kept->begins[static_cast<size_t>(share)];
    return most;
  };
  int64_t most = 0;
  for (const int64_t worker : step.taken) most += most_of(first_of(worker));
  if (most == 0) return;
  sums_.begin(most);
  for (const int64_t worker : step.taken) {
    const Kept* first = first_of(worker);
    if (first == nullptr) continue;
    if (first->next == 0) {
      add_share(*first, share, sums_);
      continue;
    }
    // One worker's pushes are summed before they are added to those of other workers.
    own_.begin(most_of(first));
    for (const Kept* kept = first; kept != nullptr; kept = after(kept))
      add_share(*kept, share, own_);
    for (int64_t i = 0; i < own_.size(); ++i) sums_.own(sums_.add(own_.id(i), own_.row(i)));
  }
  for (int64_t i = 0; i < sums_.size(); ++i) {
    if (i + kAhead < sums_.size()) rows_.fetch_record(sums_.id(i + kAhead));
    if (step.divisor != 1) divide(sums_.own(i), step.divisor);
    step_row(sums_.id(i), sums_.row(i), step.lr, 1);
  }
}

// --- faults --------------------------------------------------------------------------------------

std::string SparseSteps::name_of(int64_t share) const {
  return c10::str("share ", share, " of ", kShares, " of the rows of table '", spec().name, "'");
}

std::string SparseSteps::held_by(int64_t worker) const {
  const std::string held = TableSteps::held_by(worker);
  return held.empty() ? rows_.held_by(worker) : held;
}

int64_t SparseSteps::count_torn(std::vector<std::string>& names) const {
  return TableSteps::count_torn(names) + rows_.count_torn(names);
}

}  // namespace trireme::ps
