// Workers as threads over one mapping of a table's memory, which is what ThreadSanitizer can
// follow: who makes, takes, steps and reads rows, and who applies a clock.

#include <trireme/strategies/parameter_server/sparse_steps.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <functional>
#include <memory>
#include <random>
#include <strategies/parameter_server/shared_boards.h>
#include <vector>

namespace trireme::shared_rows_test {

namespace {

using namespace trireme::ps;
using namespace trireme::test;

constexpr int64_t kDim = 40;
constexpr int64_t kIds = 3000;  // more than the first index holds

// The memory of a server without a group: what ranks of a host would map.
class SharedTable {
 public:
  SharedTable(int64_t workers, Mode mode)
      : spec_(std::make_shared<const TableSpec>(
            sparse("items", kDim, Sum{}, {.init = Zeros{}, .reduction = Reduction::kSum}))),
        plan_(make_sparse_table_plan(SparseSteps::kShares, workers)),
        row_plan_(make_row_plan({.dim = kDim,
                                 .workers = workers,
                                 .deposits = mode == Mode::kBsp,
                                 .memory_bytes = int64_t{1} << 30})),
        boards_(workers, mode, plan_.bytes),
        rows_(segment_of(row_plan_.bytes, row_plan_.first_bytes())) {}

  // Runs each worker on a thread; `work` gets its board and the table as it sees it.
  void run(const std::function<void(ProgressTable&, SparseSteps&)>& work) {
    boards_.run([&](const std::shared_ptr<ProgressTable>& board) {
      TableSteps::Parts parts;
      parts.spec = spec_;
      parts.board = board;
      parts.memory = boards_.table();
      SparseSteps steps(parts, plan_, {spec_, board, rows_, nullptr}, row_plan_);
      work(*board, steps);
    });
  }

 private:
  std::shared_ptr<const TableSpec> spec_;
  TablePlan plan_;
  RowPlan row_plan_;
  SharedBoards boards_;
  std::shared_ptr<const shm::Segment> rows_;
};

// Ones for each of some ids.
class Ones {
 public:
  explicit Ones(at::ScalarType computed) : sums_(kDim, computed) {}
  const RowSums& of(const std::vector<int64_t>& ids) {
    sums_.begin(static_cast<int64_t>(ids.size()));
    for (const int64_t id : ids) sums_.add(id, span_of(row_));
    return sums_;
  }

 private:
  at::Tensor row_ = at::ones({kDim});
  RowSums sums_;
};

std::vector<int64_t> draw_ids(std::mt19937_64& drawn, size_t count) {
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(drawn() % kIds);
  return ids;
}

// What pushes of ones have added up to in all rows; -1 where the elements of a row differ.
double sum_of_all(SparseSteps& steps) {
  double sum = 0;
  std::vector<float> row(kDim);
  for (const int64_t id : steps.rows().ids()) {
    int64_t place = RowStore::kNone;
    steps.rows().find(&id, 1, &place);
    steps.rows().read(place, reinterpret_cast<std::byte*>(row.data()), test_errand());
    if (std::any_of(row.begin(), row.end(), [&](float value) { return value != row[0]; }))
      return -1;
    sum += row[0];
  }
  return sum;
}

}  // namespace

TEST_CASE("rows that threads make, step and read at once") {
  constexpr int64_t kWorkers = 4;
  constexpr int64_t kPushes = 60;
  SharedTable table(kWorkers, Mode::kAsync);
  std::atomic<int64_t> mixed{0};
  table.run([&](ProgressTable& board, SparseSteps& steps) {
    std::mt19937_64 drawn(static_cast<uint64_t>(*board.worker()));
    Ones ones(steps.computed());
    std::vector<float> row(kDim);
    for (int64_t push = 0; push < kPushes; ++push) {
      const std::vector<int64_t> ids = draw_ids(drawn, 50);
      steps.step_now(ones.of(ids), 1, test_errand());
      for (const int64_t id : ids) {
        int64_t place = RowStore::kNone;
        steps.rows().find(&id, 1, &place);
        steps.rows().read(place, reinterpret_cast<std::byte*>(row.data()), test_errand());
        if (std::any_of(row.begin(), row.end(), [&](float value) { return value != row[0]; }))
          ++mixed;
      }
    }
  });
  CHECK(mixed == 0);
  double sum = 0;
  table.run([&](ProgressTable& board, SparseSteps& steps) {
    if (board.worker() == 0) sum = sum_of_all(steps);
  });
  CHECK(sum == kWorkers * kPushes * 50);
}

TEST_CASE("clocks that threads apply together") {
  constexpr int64_t kWorkers = 3;
  constexpr int64_t kClocks = 30;
  SharedTable table(kWorkers, Mode::kBsp);
  std::atomic<int64_t> wrong{0};
  table.run([&](ProgressTable& board, SparseSteps& steps) {
    std::mt19937_64 drawn(static_cast<uint64_t>(*board.worker()));
    Ones ones(steps.computed());
    for (int64_t clock = 0; clock < kClocks; ++clock) {
      steps.bring_to(static_cast<uint64_t>(clock), test_errand());
      // No other worker applies the next clock before this one has clocked it.
      if (*board.worker() == 0 && sum_of_all(steps) != clock * kWorkers * 2 * 40) ++wrong;
      for (int push = 0; push < 2; ++push)
        steps.deposit(ones.of(draw_ids(drawn, 40)), 1, test_errand());
      board.set_clock(static_cast<uint64_t>(clock) + 1);
      board.commit_clocks();
      steps.apply_committed();
    }
  });
  CHECK(wrong == 0);
}

}  // namespace trireme::shared_rows_test
