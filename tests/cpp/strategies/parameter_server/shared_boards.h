#pragma once

#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <array>
#include <catch_torch.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme::test {

// Workers as threads over one mapping, without a group, which is what ThreadSanitizer can follow.
class SharedBoards {
 public:
  // `table_bytes`: of what a table has beside its values, behind the board; zeros.
  SharedBoards(int64_t workers, ps::Mode mode, int64_t table_bytes)
      : plan_{workers, workers},
        options_{.mode = mode},
        lines_(static_cast<size_t>(plan_.bytes() + table_bytes) / sizeof(Line) + 2) {
    for (int64_t worker = 0; worker < workers; ++worker) boards_.push_back(make_board(worker));
    for (const auto& board : boards_) board->watch_peers();
  }

  std::byte* table() { return memory() + plan_.bytes(); }

  // Runs each worker on a thread; `work` gets its board.
  void run(const std::function<void(const std::shared_ptr<ps::ProgressTable>&)>& work) const {
    std::vector<std::thread> threads;
    for (const auto& board : boards_) threads.emplace_back([&work, board] { work(board); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct alignas(64) Line {
    std::array<std::byte, 64> bytes;
  };
  std::byte* memory() { return reinterpret_cast<std::byte*>(lines_.data()); }
  std::shared_ptr<ps::ProgressTable> make_board(int64_t worker) {
    ps::ProgressTable::Request request;
    request.memory = memory();
    request.options = options_;
    request.plan = plan_;
    request.line = worker;
    request.where = {worker, plan_.workers};
    return std::make_shared<ps::ProgressTable>(std::move(request));
  }

  ps::BoardPlan plan_;
  ps::Options options_;
  std::vector<Line> lines_;
  std::vector<std::shared_ptr<ps::ProgressTable>> boards_;
};

// A segment of which the first `used` bytes are there.
inline std::shared_ptr<const shm::Segment> segment_of(int64_t bytes, int64_t used) {
  auto segment = shm::Segment::create_growing(shm::SegmentKind::kAnonymous, bytes);
  std::string why_not;
  REQUIRE(segment.grow(0, used, why_not));
  return std::make_shared<const shm::Segment>(std::move(segment));
}

inline ps::WaitContext test_errand() {
  return {[] { return std::string("a test"); }, "lock"};
}

}  // namespace trireme::test
