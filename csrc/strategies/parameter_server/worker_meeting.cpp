#include <trireme/strategies/parameter_server/worker_meeting.h>

#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>

namespace trireme::ps {

// This worker's part in a meeting. Its end is the beginning of the next meeting's, also after an
// error.
class WorkerMeeting::Section {
 public:
  explicit Section(WorkerMeeting& meeting)
      : meeting_(meeting), line_(meeting.board_->line(*meeting.board_->worker())) {
    line_.met_clock[meeting_.meetings_ & 1].store(meeting_.board_->clock(),
                                                  std::memory_order_relaxed);
  }
  ~Section() {
    reach(kDone);
    ++meeting_.meetings_;
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  void reach(Phase phase) {
    line_.met.store(3 * meeting_.meetings_ + phase, std::memory_order_seq_cst);
    meeting_.board_->ring_all();
  }
  // Tells the others that this worker has not done its part.
  void fail(std::string_view text) {
    line_.leave_word(text);
    line_.met_failed.store(meeting_.meetings_ + 1, std::memory_order_seq_cst);
  }

 private:
  WorkerMeeting& meeting_;
  WorkerLine& line_;
};

// Skips the meetings that this worker missed.
void WorkerMeeting::catch_up() {
  for (int64_t worker = 0; worker < board_->workers(); ++worker)
    meetings_ = std::max(meetings_, board_->line(worker).met.load(std::memory_order_acquire) / 3);
}

void WorkerMeeting::check_failed(const std::vector<int64_t>& come, const WaitContext& context) {
  for (const int64_t worker : come) {
    if (board_->line(worker).met_failed.load(std::memory_order_acquire) != meetings_ + 1) continue;
    C10_THROW_ERROR(
        DistBackendError,
        error_text(kPsArea,
                   c10::str(context.text(), ": ", board_->name_of(worker),
                            " could not: ", board_->line(worker).word()),
                   board_->where(), "Mend what it says, and call this again on all workers."));
  }
}

// Waits for all live workers, and returns those that reached the phase; the others are gone.
std::vector<int64_t> WorkerMeeting::wait_for_all(Phase phase, const WaitContext& context) {
  std::vector<int64_t> come;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    WaitContext for_worker = context;
    for_worker.worker = worker;
    if (board_->wait(board_->line(worker).met, 3 * meetings_ + phase, for_worker))
      come.push_back(worker);
  }
  return come;
}

void WorkerMeeting::check_clocks(const std::vector<int64_t>& come, const WaitContext& context) {
  for (const int64_t worker : come) {
    const uint64_t clock =
        board_->line(worker).met_clock[meetings_ & 1].load(std::memory_order_relaxed);
    TORCH_CHECK_VALUE(
        clock == board_->clock(),
        error_text(kPsArea,
                   c10::str(context.text(), ": got ", board_->name_of(worker), " at clock ", clock,
                            ", expected all workers at one clock"),
                   board_->where(), "Call it after as many clocks on all workers."));
  }
}

void WorkerMeeting::hold(const Plan& plan) {
  catch_up();
  Section section(*this);
  try {
    section.reach(kCome);
    const std::vector<int64_t> come = wait_for_all(kCome, plan.context);
    if (plan.at_one_clock) check_clocks(come, plan.context);
    check_failed(come, plan.context);
    plan.prepare();
    section.reach(kPrepared);
    const std::vector<int64_t> prepared = wait_for_all(kPrepared, plan.context);
    check_failed(prepared, plan.context);
    work(plan, prepared.front());
  } catch (const std::exception& error) {
    section.fail(what_of(error));
    throw;
  }
}

void WorkerMeeting::work(const Plan& plan, int64_t first) {
  if (first == board_->worker()) return plan.work();
  WaitContext context = plan.context;
  context.worker = first;
  context.has_deadline = false;  // the others stand still for as long as it takes
  const bool has_ended = board_->wait(board_->line(first).met, 3 * meetings_ + kDone, context);
  check_failed({first}, plan.context);
  if (has_ended) return;
  C10_THROW_ERROR(DistBackendError,
                  error_text(kPsArea,
                             c10::str(plan.context.text(), ": ", board_->name_of(first),
                                      " has gone while it was at it"),
                             board_->where(), "Call this again on all workers."));
}

}  // namespace trireme::ps
