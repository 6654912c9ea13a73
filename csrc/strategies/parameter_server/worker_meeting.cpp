#include <trireme/strategies/parameter_server/worker_meeting.h>

#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>

// See [Note: workers that meet] in worker_meeting.h.

namespace trireme::ps {

// Skips the meetings that this worker missed.
void WorkerMeeting::catch_up() {
  for (int64_t worker = 0; worker < parts_.board->workers(); ++worker)
    meetings_ =
        std::max(meetings_, parts_.line_of(worker).phases.load(std::memory_order_acquire) / 3);
}

void WorkerMeeting::reach(Phase phase) noexcept {
  own_line().phases.store(3 * meetings_ + phase, std::memory_order_seq_cst);
  parts_.board->ring_all();
}

// Returns false if the worker is gone before it has reached the phase.
bool WorkerMeeting::wait_for(int64_t worker, Phase phase, WaitContext context) {
  context.worker = worker;
  return parts_.board->wait(parts_.line_of(worker).phases, 3 * meetings_ + phase, context);
}

// Waits for all live workers, and returns those that reached the phase; the others are gone.
std::vector<int64_t> WorkerMeeting::meet(Phase phase, const WaitContext& context) {
  reach(phase);
  std::vector<int64_t> come;
  for (int64_t worker = 0; worker < parts_.board->workers(); ++worker)
    if (wait_for(worker, phase, context)) come.push_back(worker);
  return come;
}

void WorkerMeeting::check_clocks(const std::vector<int64_t>& come, const WaitContext& context) {
  for (const int64_t worker : come) {
    const uint64_t clock =
        parts_.line_of(worker).clock[meetings_ & 1].load(std::memory_order_relaxed);
    TORCH_CHECK_VALUE(
        clock == parts_.board->clock(),
        error_text(kPsArea,
                   c10::str(context.text(), ": got ", parts_.board->name_of(worker), " at clock ",
                            clock, ", expected all workers at one clock"),
                   parts_.board->where(), parts_.texts.at_other_clock));
  }
}

void WorkerMeeting::check_failed(const std::vector<int64_t>& come, const WaitContext& context) {
  for (const int64_t worker : come) {
    if (parts_.line_of(worker).failed.load(std::memory_order_acquire) != meetings_ + 1) continue;
    others_failed_ = true;
    C10_THROW_ERROR(DistBackendError,
                    error_text(kPsArea,
                               c10::str(context.text(), ": ", parts_.board->name_of(worker),
                                        parts_.texts.has_failed, parts_.board->line(worker).word()),
                               parts_.board->where(), parts_.texts.after_failure));
  }
}

void WorkerMeeting::begin(const Plan& plan) {
  catch_up();
  others_failed_ = false;
  own_line().clock[meetings_ & 1].store(parts_.board->clock(), std::memory_order_relaxed);
  const std::vector<int64_t> come = meet(kCome, plan.context);
  if (plan.at_one_clock) check_clocks(come, plan.context);
  check_failed(come, plan.context);
  plan.prepare();
}

void WorkerMeeting::work(const Plan& plan) {
  const std::vector<int64_t> prepared = meet(kPrepared, plan.context);
  check_failed(prepared, plan.context);
  const int64_t first = prepared.front();
  if (first == parts_.board->worker()) return plan.work();
  WaitContext context = plan.context;
  context.has_deadline = plan.works_in_time;
  const bool has_ended = wait_for(first, kDone, context);
  check_failed({first}, plan.context);
  if (has_ended) return;
  C10_THROW_ERROR(DistBackendError,
                  error_text(kPsArea,
                             c10::str(plan.context.text(), ": ", parts_.board->name_of(first),
                                      parts_.texts.has_gone),
                             parts_.board->where(), parts_.texts.after_end));
}

// Leaves no word behind another worker's: each worker finds the one that failed first.
void WorkerMeeting::fail(std::string_view reason) noexcept {
  if (others_failed_) return;
  parts_.board->line(*parts_.board->worker()).leave_word(reason);
  own_line().failed.store(meetings_ + 1, std::memory_order_seq_cst);
}

void WorkerMeeting::end() noexcept {
  reach(kDone);
  ++meetings_;
}

void WorkerMeeting::hold(const Plan& plan) {
  const auto at_end = c10::make_scope_exit([this] { end(); });
  try {
    begin(plan);
    work(plan);
  } catch (const std::exception& error) {
    fail(what_of(error));
    throw;
  }
}

}  // namespace trireme::ps
