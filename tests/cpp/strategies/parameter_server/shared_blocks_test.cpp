// Workers as threads over one mapping of a dense table's memory, which is what ThreadSanitizer can
// follow: who takes and steps blocks, and who applies a clock.

#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/dense_steps.h>
#include <trireme/strategies/parameter_server/table_plan.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <strategies/parameter_server/shared_boards.h>
#include <vector>

namespace trireme::shared_blocks_test {

namespace {

using namespace trireme::ps;
using namespace trireme::test;
using Gradients = std::vector<at::Tensor>;

constexpr int64_t kLongNumel = 2 * kBlockNumel + 100;  // three blocks
constexpr int64_t kShortNumel = 7;                     // one more

// The memory of a server without a group: what ranks of a host would map.
class SharedTable {
 public:
  SharedTable(int64_t workers, Mode mode)
      : spec_(std::make_shared<const TableSpec>(make_spec())),
        infos_{{"long", {kLongNumel}, kLongNumel}, {"short", {kShortNumel}, kShortNumel}},
        plan_(make_table_plan(
            {.tensors = infos_, .workers = workers, .deposits = mode == Mode::kBsp})),
        boards_(workers, mode, plan_.bytes) {
    const int64_t bytes = HostStore::bytes_for(infos_, workers);
    store_ = HostStore::make(segment_of(bytes, bytes), infos_, {0, workers});
  }

  // Runs each worker on a thread; `work` gets its board and the table as it sees it.
  void run(const std::function<void(ProgressTable&, DenseSteps&)>& work) {
    boards_.run([&](const std::shared_ptr<ProgressTable>& board) {
      TableSteps::Parts parts;
      parts.spec = spec_;
      parts.board = board;
      parts.memory = boards_.table();
      DenseSteps steps(parts, plan_, store_);
      work(*board, steps);
    });
  }

 private:
  static TableSpec make_spec() {
    NamedTensors tensors;
    tensors.insert("long", at::zeros({kLongNumel}));
    tensors.insert("short", at::zeros({kShortNumel}));
    return dense("t", tensors, Sum{}, {.reduction = Reduction::kSum});
  }

  std::shared_ptr<const TableSpec> spec_;
  std::vector<ParameterInfo> infos_;
  TablePlan plan_;
  SharedBoards boards_;
  std::shared_ptr<HostStore> store_;
};

// Says whether all elements of a tensor are that. Plain reads, which ThreadSanitizer sees.
bool is_all(const at::Tensor& values, int64_t expected) {
  const auto* begin = values.const_data_ptr<float>();
  return std::all_of(begin, begin + values.numel(),
                     [&](float value) { return value == static_cast<float>(expected); });
}

}  // namespace

TEST_CASE("blocks that threads step at once") {
  constexpr int64_t kWorkers = 4;
  constexpr int64_t kPushes = 40;
  SharedTable table(kWorkers, Mode::kSsp);
  table.run([&](ProgressTable&, DenseSteps& steps) {
    const Gradients all = {at::ones({kLongNumel}), at::ones({kShortNumel})};
    const Gradients some = {at::ones({kLongNumel}), {}};
    for (int64_t push = 0; push < kPushes; ++push)
      steps.step_now(push % 2 == 0 ? all : some, 1, test_errand());
  });
  bool is_right = false;
  std::vector<int64_t> counts;
  table.run([&](ProgressTable& board, DenseSteps& steps) {
    if (board.worker() != 0) return;
    is_right = is_all(steps.values()[0], kWorkers * kPushes) &&
               is_all(steps.values()[1], kWorkers * kPushes / 2);
    for (const int64_t tensor : {0, 1}) {
      const at::Tensor steps_made = steps.step_counts(tensor).contiguous();
      const auto* begin = steps_made.const_data_ptr<int64_t>();
      counts.insert(counts.end(), begin, begin + steps_made.numel());
    }
  });
  CHECK(is_right);
  constexpr int64_t kAll = kWorkers * kPushes;
  CHECK(counts == std::vector<int64_t>{kAll, kAll, kAll, kAll / 2});
}

TEST_CASE("clocks whose blocks threads claim together") {
  constexpr int64_t kWorkers = 3;
  constexpr int64_t kClocks = 20;
  SharedTable table(kWorkers, Mode::kBsp);
  std::atomic<int64_t> wrong{0};
  table.run([&](ProgressTable& board, DenseSteps& steps) {
    const Gradients all = {at::ones({kLongNumel}), at::ones({kShortNumel})};
    const Gradients some = {{}, at::ones({kShortNumel})};
    for (int64_t clock = 0; clock < kClocks; ++clock) {
      steps.bring_to(static_cast<uint64_t>(clock), test_errand());
      // Everybody reads: no worker applies the next clock before this one has clocked it.
      if (!is_all(steps.values()[0], clock * kWorkers)) ++wrong;
      if (!is_all(steps.values()[1], clock * kWorkers * 2)) ++wrong;
      steps.deposit(all, 1);
      steps.deposit(some, 1);
      board.set_clock(static_cast<uint64_t>(clock) + 1);
      board.commit_clocks();
      steps.apply_committed();
    }
  });
  CHECK(wrong == 0);
}

}  // namespace trireme::shared_blocks_test
