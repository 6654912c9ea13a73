#include <trireme/strategies/parameter_server/worker_session.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace trireme::ps {

WorkerSession::WorkerSession(std::shared_ptr<ProgressTable> board) : board_(std::move(board)) {}

bool WorkerSession::is_forked() const { return fork_guard_.in_child(); }

void WorkerSession::check_open(std::string_view verb) const {
  const auto refuse = [&](const char* got, const char* next_step) {
    TORCH_CHECK(false, error_text(kPsArea, c10::str(verb, ": ", got), board_->where(), next_step));
  };
  if (is_closed_)
    refuse("got a server that is closed, expected an open one", "Call close() after the last use.");
  if (is_forked())
    refuse("got a forked child of the process that made the server, expected that process",
           "Use the server in the parent only.");
}

void WorkerSession::check_worker(std::string_view verb) const {
  check_open(verb);
  const auto refuse = [&](const char* got, const char* next_step) {
    TORCH_CHECK(false, error_text(kPsArea, c10::str(verb, ": ", got), board_->where(), next_step));
  };
  if (!board_->worker())
    refuse("got a rank that serves, expected one that works",
           "Call serve() on it, and nothing else.");
  if (has_left_)
    refuse("got a worker that has left, expected one that is there",
           "Call leave() after the last clock().");
}

std::unique_lock<WorkerLock> WorkerSession::turn() const {
  if (is_forked()) return {};
  return std::unique_lock(board_->worker_lock());
}

std::unique_lock<WorkerLock> WorkerSession::enter(std::string_view verb) const {
  auto turn = this->turn();
  check_worker(verb);
  return turn;
}

std::unique_lock<WorkerLock> WorkerSession::enter_open(std::string_view verb) const {
  auto turn = this->turn();
  check_open(verb);
  return turn;
}

void WorkerSession::count_dropped() {
  while (!undecided_.empty() && board_->committed() > undecided_.front().clock) {
    const ClockPushes& first = undecided_.front();
    if (!board_->takes(*board_->worker(), first.clock)) counts_.dropped += first.pushes;
    undecided_.pop_front();
  }
}

bool WorkerSession::count_push() {
  ++counts_.pushes;
  if (board_->options().backup == 0) return true;
  count_dropped();
  if (board_->committed() > board_->clock()) {
    ++counts_.dropped;
    return false;
  }
  ++open_pushes_;
  return true;
}

void WorkerSession::move_clock() {
  const uint64_t clock = board_->clock();
  if (board_->options().backup == 0) {
    board_->set_clock(clock + 1);
    board_->commit_clocks();
    return;
  }
  count_dropped();
  const int64_t pushes = std::exchange(open_pushes_, 0);
  if (board_->committed() > clock) {
    counts_.dropped += pushes;
    board_->set_clock(board_->committed());
  } else {
    undecided_.push_back({clock, pushes});
    board_->set_clock(clock + 1);
    board_->commit_clocks();
    count_dropped();
    if (board_->committed() > clock + 1) board_->set_clock(board_->committed());
  }
  board_->commit_clocks();
}

}  // namespace trireme::ps
