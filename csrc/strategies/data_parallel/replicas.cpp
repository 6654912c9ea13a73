#include <trireme/strategies/data_parallel/replicas.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/memory/warm_heap.h>
#include <trireme/strategies/data_parallel/messages.h>
#include <trireme/strategies/data_parallel/replica_pass.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLopsided = 1.25;
constexpr int64_t kStepsBeforeWarning = 10;
constexpr double kLeastMsToWarn = 5;       // below, wake-ups make the difference
constexpr int64_t kGradientsInFlight = 4;  // the largest ones, before they are summed and freed

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

bool is_cancelled(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const GradSum::Cancelled&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string two_digits(double number) { return std::to_string(number).substr(0, 4); }

}  // namespace

Replicas::Replicas(ModuleReplicas module, std::shared_ptr<WorkerPool> pool, ReplicasOptions options)
    : tensors_(std::move(module), options.copy_always),
      pool_(std::move(pool)),
      options_(std::move(options)),
      grad_sum_(tensors_.module().leaves),
      balances_{SpeedBalance(tensors_.count()), SpeedBalance(tensors_.count())},
      smoothed_ms_(tensors_.count()),
      backward_in_engine_(options_.copy_always || !tensors_.module().devices.front().is_cpu()) {
  TORCH_INTERNAL_ASSERT(pool_->count() == tensors_.count());
  TORCH_CHECK_VALUE(options_.weights.empty() || options_.weights.size() == tensors_.count(),
                    error_text(kDataParallelArea,
                               "got " + std::to_string(options_.weights.size()) +
                                   " weights, expected one for each of " +
                                   std::to_string(tensors_.count()) + " replicas",
                               {}, "Give one share of the batch per replica."));
  int64_t largest = 0;
  for (const at::Tensor& parameter : tensors_.module().parameters)
    largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
  if (tensors_.module().devices.front().is_cpu()) keep_heap_warm(kGradientsInFlight * largest);
}

std::string Replicas::describe(size_t replica) const {
  return std::string("replica ") + std::to_string(replica) + " of " +
         std::to_string(tensors_.count()) + " (" + tensors_.module().devices[replica].str() + ")";
}

std::shared_ptr<ReplicaPass> Replicas::begin(int64_t rows) {
  const std::lock_guard turn(turn_);
  const int64_t copied = tensors_.refresh();
  warn_if_lopsided();
  const std::lock_guard lock(report_mutex_);
  report_.copied_bytes = copied;
  std::vector<Chunk> chunks;
  if (options_.auto_balance) {
    chunks = weighted_chunks(rows, balances_[at::GradMode::is_enabled() ? 1 : 0].weights());
  } else if (!options_.weights.empty()) {
    chunks = weighted_chunks(rows, options_.weights);
  } else {
    chunks = even_chunks(rows, tensors_.count());
  }
  return std::make_shared<ReplicaPass>(shared_from_this(), std::move(chunks));
}

void Replicas::run(ReplicaPass& pass, const Job& job, bool is_forward,
                   const std::function<void()>& while_waiting) {
  std::vector<double>& milliseconds = is_forward ? pass.forward_ms_ : pass.backward_ms_;
  const std::vector<size_t> replicas = pass.replicas();
  std::vector<size_t> position_of(tensors_.count());
  for (size_t position = 0; position < replicas.size(); ++position)
    position_of[replicas[position]] = position;
  const auto timed_job = [&](size_t replica) {
    const Clock::time_point begin = Clock::now();
    const ReplicaRandomGuard random(is_forward ? &pass.random_ : nullptr, replica);
    job(position_of[replica]);
    milliseconds[position_of[replica]] = ms_since(begin);
  };
  rethrow_first(replicas, pool_->run(replicas, timed_job, while_waiting));
}

void Replicas::forward(ReplicaPass& pass, const Job& job,
                       const std::function<void()>& while_waiting) {
  TRIREME_TRACE("data_parallel.forward");
  const Clock::time_point begin = Clock::now();
  run(pass, job, /*is_forward=*/true, while_waiting);
  const std::lock_guard lock(report_mutex_);
  report_.forward_ms = ms_since(begin);
  if (!pass.records_) note(pass, /*with_backward=*/false);
}

// Runs all backwards at the same time: in the threads of the replicas, or, where the engine has a
// thread per device, as one run of it; see [Note: two graphs].
void Replicas::run_all_backwards(ReplicaPass& pass, const RunBackward& run_backward) {
  if (backward_in_engine_) {
    const Clock::time_point begin = Clock::now();
    std::vector<size_t> positions(pass.chunks().size());
    std::iota(positions.begin(), positions.end(), size_t{0});
    run_backward(positions);
    pass.backward_ms_.assign(positions.size(), ms_since(begin));
    return;
  }
  const auto cancelling = [&](size_t position) {
    try {
      run_backward({position});
    } catch (const GradSum::Cancelled&) {
      throw;
    } catch (...) {
      grad_sum_.cancel();
      if (error_listener_)
        error_listener_(pass.chunks()[position].replica, std::current_exception());
      throw;
    }
  };
  std::exception_ptr interrupt;
  const auto while_waiting = [&] {
    if (interrupt || !interrupt_) return;
    interrupt = interrupt_();
    if (interrupt) grad_sum_.cancel();
  };
  run(pass, cancelling, /*is_forward=*/false, while_waiting);
  if (interrupt) std::rethrow_exception(interrupt);
}

std::vector<at::Tensor> Replicas::backward(ReplicaPass& pass, const RunBackward& run_backward) {
  TRIREME_TRACE("data_parallel.backward");
  const std::lock_guard turn(turn_);
  const Clock::time_point begin = Clock::now();
  tensors_.expect_step();
  tensors_.follow_masters();
  grad_sum_.begin(pass.replicas(), tensors_.module().parameters);
  try {
    run_all_backwards(pass, run_backward);
  } catch (...) {
    grad_sum_.drop();
    for (const auto& input : pass.inputs_)
      for (const at::Tensor& leaf : input.leaves) leaf.mutable_grad().reset();
    throw;
  }
  std::vector<at::Tensor> sums = grad_sum_.finish();
  const std::lock_guard lock(report_mutex_);
  ++report_.step;
  report_.backward_ms = ms_since(begin);
  note(pass, /*with_backward=*/true);
  return sums;
}

void Replicas::rethrow_first(const std::vector<size_t>& replicas,
                             const std::vector<std::exception_ptr>& errors) const {
  for (size_t position = 0; position < errors.size(); ++position) {
    if (!errors[position] || is_cancelled(errors[position])) continue;
    try {
      std::rethrow_exception(errors[position]);
    } catch (c10::Error& error) {
      if (!error_listener_) error.add_context("[data_parallel] in " + describe(replicas[position]));
      throw;
    } catch (const std::exception& error) {
      if (error_listener_) throw;  // the listener has named it
      std::throw_with_nested(
          c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                     error_text(kDataParallelArea,
                                std::string("got an exception in ") + describe(replicas[position]) +
                                    ": " + error.what(),
                                {}, "The exception itself is nested in this one.")));
    }
  }
}

// Records the times of the last pass, for reports and for the balance. The caller holds
// report_mutex_.
void Replicas::note(const ReplicaPass& pass, bool with_backward) {
  std::vector<double> milliseconds = pass.forward_ms_;
  double longest = 0;
  for (size_t position = 0; position < milliseconds.size(); ++position) {
    if (with_backward) milliseconds[position] += pass.backward_ms_[position];
    longest = std::max(longest, milliseconds[position]);
  }
  balances_[with_backward ? 1 : 0].record(pass.chunks(), milliseconds);
  report_.replicas.assign(tensors_.count(), {});
  for (size_t replica = 0; replica < tensors_.count(); ++replica) {
    report_.replicas[replica].device = tensors_.module().devices[replica];
    report_.replicas[replica].memory_bytes = tensors_.own_bytes(replica);
  }
  for (size_t position = 0; position < pass.chunks().size(); ++position) {
    ReplicaReport& own = report_.replicas[pass.chunks()[position].replica];
    own.rows = pass.chunks()[position].rows;
    own.forward_ms = pass.forward_ms_[position];
    own.backward_ms = with_backward ? pass.backward_ms_[position] : 0;
    own.waiting_share = longest > 0 ? 1 - milliseconds[position] / longest : 0;
  }
  if (pass.chunks().size() != tensors_.count()) return;
  ++measured_steps_;
  for (size_t position = 0; position < milliseconds.size(); ++position) {
    double& smoothed = smoothed_ms_[pass.chunks()[position].replica];
    const double ms = milliseconds[position];
    smoothed = measured_steps_ == 1 ? ms : 0.8 * smoothed + 0.2 * ms;
  }
}

void Replicas::warn_if_lopsided() {
  std::string text;
  {
    const std::lock_guard lock(report_mutex_);
    if (warned_ || measured_steps_ < kStepsBeforeWarning) return;
    const auto [least, most] = std::minmax_element(smoothed_ms_.begin(), smoothed_ms_.end());
    if (*most <= kLopsided * *least || *most < kLeastMsToWarn) return;
    warned_ = true;
    text = error_text(
        kDataParallelArea,
        describe(static_cast<size_t>(most - smoothed_ms_.begin())) + " takes " +
            two_digits(*most / *least) + " times as long as " +
            describe(static_cast<size_t>(least - smoothed_ms_.begin())) + ", expected at most " +
            two_digits(kLopsided),
        {}, options_.auto_balance ? "See last_step()." : "Try balance=\"auto\"; see last_step().");
  }
  TORCH_WARN(text);
}

ReplicasReport Replicas::last_step() const {
  const std::lock_guard lock(report_mutex_);
  return report_;
}

}  // namespace trireme
