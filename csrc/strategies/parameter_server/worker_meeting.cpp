#include <trireme/strategies/parameter_server/worker_meeting.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>

namespace trireme::ps {

// Ends this worker's part in a meeting, however it ends.
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
  void fail(std::string_view text) {
    meeting_.board_->leave_word(text);
    line_.met_failed.store(meeting_.meetings_ + 1, std::memory_order_seq_cst);
  }

 private:
  WorkerMeeting& meeting_;
  WorkerLine& line_;
};

// Returns the workers that have come so far; the others are gone.
std::vector<int64_t> WorkerMeeting::wait_for_all(Phase phase, const Errand& errand) {
  std::vector<int64_t> come;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    Errand one = errand;
    one.worker = worker;
    if (board_->wait(board_->line(worker).met, 3 * meetings_ + phase, one)) come.push_back(worker);
  }
  return come;
}

void WorkerMeeting::check_clocks(const std::vector<int64_t>& come, const Errand& errand) {
  for (const int64_t worker : come) {
    const uint64_t clock =
        board_->line(worker).met_clock[meetings_ & 1].load(std::memory_order_relaxed);
    TORCH_CHECK_VALUE(
        clock == board_->clock(),
        error_text(kPsArea,
                   c10::str(errand.text(), ": got ", board_->name_of(worker), " at clock ", clock,
                            ", expected all workers at one clock"),
                   board_->where(), "Call it after as many clocks on all workers."));
  }
}

void WorkerMeeting::hold(const Plan& plan) {
  Section section(*this);
  section.reach(kCome);
  const std::vector<int64_t> come = wait_for_all(kCome, plan.errand);
  if (plan.at_one_clock) check_clocks(come, plan.errand);
  plan.prepare();
  section.reach(kPrepared);
  const std::vector<int64_t> prepared = wait_for_all(kPrepared, plan.errand);
  const int64_t first = prepared.front();
  if (first == board_->worker()) {
    try {
      plan.work();
    } catch (const std::exception& error) {
      section.fail(error.what());
      throw;
    }
    return;
  }
  Errand errand = plan.errand;
  errand.worker = first;
  const WorkerLine& line = board_->line(first);
  const bool has_ended = board_->wait(line.met, 3 * meetings_ + kDone, errand);
  if (has_ended && line.met_failed.load(std::memory_order_acquire) != meetings_ + 1) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea,
                 c10::str(plan.errand.text(), ": ", board_->name_of(first),
                          has_ended ? " could not: " + board_->word_of(first)
                                    : std::string(" has gone while it was at it")),
                 board_->where(), "Mend what it says, and call this again on all workers."));
}

}  // namespace trireme::ps
