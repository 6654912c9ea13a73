#include <trireme/strategies/parameter_server/block_lock.h>

namespace trireme::ps {
namespace {

// The holder's word has worker + 1 in its low bits, and above them what the holder has done.
constexpr int kDoneShift = 16;
constexpr uint64_t kWorkerMask = (uint64_t{1} << kDoneShift) - 1;
int64_t worker_in(uint64_t holder) { return static_cast<int64_t>(holder & kWorkerMask) - 1; }

// Counts this worker among the waiters that a holder wakes.
class Waiting {
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

uint64_t word_of(const ProgressTable& board) { return static_cast<uint64_t>(*board.worker()) + 1; }

}  // namespace

uint64_t BlockLock::done_in(uint64_t holder) { return holder >> kDoneShift; }

bool BlockLock::try_acquire(BlockLine& line, uint64_t& before) const {
  before = 0;
  const uint64_t own = word_of(*board_);
  if (line.holder.compare_exchange_strong(before, own, std::memory_order_seq_cst)) return true;
  return board_->options().on_worker_loss == WorkerLoss::kContinue &&
         has_broken_off(board_->state_of(worker_in(before))) &&
         line.holder.compare_exchange_strong(before, own, std::memory_order_seq_cst);
}

void BlockLock::release(BlockLine& line, uint64_t done) const {
  line.holder.store(done << kDoneShift | word_of(*board_), std::memory_order_seq_cst);
  if (board_->options().mode == Mode::kBsp) line.applied.store(done, std::memory_order_seq_cst);
  line.holder.store(0, std::memory_order_seq_cst);
  line.released.fetch_add(1, std::memory_order_seq_cst);
  if (line.waiters.load(std::memory_order_seq_cst) > 0) board_->ring_all();
}

void BlockLock::wait_for_holder(BlockLine& line, const WaitContext& context,
                                const std::function<std::string()>& name) const {
  const Waiting waiting(line);
  const uint64_t released = line.released.load(std::memory_order_seq_cst);
  const uint64_t holder = line.holder.load(std::memory_order_seq_cst);
  if (holder == 0) return;
  const int64_t worker = worker_in(holder);
  board_->wait(line.released, released + 1,
               {[&] { return context.text() + ", at " + name(); }, "lock", worker});
}

bool BlockLock::is_held_by(const BlockLine& line, int64_t worker) {
  const uint64_t holder = line.holder.load(std::memory_order_acquire);
  return worker_in(holder) == worker && done_in(holder) == 0;
}

bool BlockLock::is_torn(const BlockLine& line) const {
  const uint64_t holder = line.holder.load(std::memory_order_acquire);
  return holder != 0 && done_in(holder) == 0 && has_broken_off(board_->state_of(worker_in(holder)));
}

}  // namespace trireme::ps
