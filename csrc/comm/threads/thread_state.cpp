#include <trireme/comm/threads/thread_state.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/spin.h>

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace trireme {
namespace {

// How often a thread looks for a message before it sleeps: some 10 us, which is less than it takes
// to be woken.
constexpr int kLooks = 200;

bool are_same(const ChannelRequest& one, const ChannelRequest& other) {
  return one.from == other.from && one.to == other.to && one.name == other.name;
}

}  // namespace

ThreadGroup::State::State(int64_t ranks, std::vector<c10::Device> devices)
    : ranks_(ranks), devices_(std::move(devices)), deposits_(static_cast<size_t>(ranks)) {
  devices_.resize(static_cast<size_t>(ranks), c10::Device(at::kCPU));
  for (int64_t rank = 0; rank < ranks; ++rank)
    rank_states_.push_back(std::make_unique<RankState>());
}

void ThreadGroup::State::throw_failure(const std::string& what, int64_t rank) const {
  C10_THROW_ERROR(DistBackendError,
                  error_text("threads", "got no further in " + what + ": " + *failure_,
                             {rank, ranks_}, "See the error of that thread."));
}

void ThreadGroup::State::expect_no_failure(const std::string& what, int64_t rank) const {
  if (failure_) throw_failure(what, rank);
}

void ThreadGroup::State::wake_all() {
  for (const auto& state : rank_states_) state->wake.notify_one();
}

void ThreadGroup::State::meet(int64_t rank, Deposit deposit, const Run& run) {
  std::unique_lock lock(mutex_);
  const std::string operation = deposit.operation;
  expect_no_failure(operation, rank);
  deposits_[static_cast<size_t>(rank)] = std::move(deposit);
  if (++arrived_ < ranks_) {
    const uint64_t own = meeting_;
    rank_states_[static_cast<size_t>(rank)]->wake.wait(
        lock, [&] { return meeting_ != own || failure_.has_value(); });
    if (meeting_ == own) throw_failure(operation, rank);
    if (!refusal_.empty()) C10_THROW_ERROR(DistBackendError, refusal_);
    return;
  }
  arrived_ = 0;
  ++meeting_;
  refusal_.clear();
  std::exception_ptr error;
  try {
    for (int64_t other = 0; other < ranks_; ++other) {
      const std::string& theirs = deposits_[static_cast<size_t>(other)].operation;
      if (theirs == operation) continue;
      C10_THROW_ERROR(
          DistBackendError,
          error_text("threads",
                     "got " + operation + ", and " + theirs + " on rank " + std::to_string(other),
                     {rank, ranks_}, "Call the same verbs in the same order on all ranks."));
    }
    run(deposits_);
  } catch (...) {
    error = std::current_exception();
    refusal_ = text_of(error);
  }
  for (Deposit& place : deposits_) place = {};
  wake_all();
  if (error) std::rethrow_exception(error);
}

void ThreadGroup::State::announce_failure(int64_t rank, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = "rank " + std::to_string(rank) + " says: " + reason;
  has_failed_ = true;
  wake_all();
}

void ThreadGroup::State::recover() {
  const std::lock_guard lock(mutex_);
  arrived_ = 0;
  for (Deposit& place : deposits_) place = {};
  failure_.reset();
  has_failed_ = false;
}

std::shared_ptr<ThreadGroup::State::Queues> ThreadGroup::State::queues(
    int64_t rank, const std::vector<ChannelRequest>& requests) {
  const std::lock_guard lock(mutex_);
  const size_t number = rank_states_[static_cast<size_t>(rank)]->channels_asked++;
  if (number == made_.size()) {
    auto queues = std::make_shared<Queues>();
    for (const ChannelRequest& request : requests)
      queues->push_back(std::make_unique<ThreadQueue>(request));
    made_.push_back(std::move(queues));
  }
  std::shared_ptr<Queues>& found = made_[number];
  bool are_alike = found->size() == requests.size();
  for (size_t i = 0; are_alike && i < requests.size(); ++i)
    are_alike = are_same((*found)[i]->request, requests[i]);
  TORCH_CHECK_VALUE(are_alike,
                    error_text("threads", "got other channels than another thread asked for",
                               {rank, ranks_}, "Ask for the same channels on every rank."));
  return found;
}

void ThreadGroup::State::push(ThreadQueue& queue, TensorMessage message) {
  const std::lock_guard lock(mutex_);
  expect_no_failure("send by " + queue.request.name, queue.request.from);
  queue.messages.push_back(std::move(message));
  queue.waiting.fetch_add(1, std::memory_order_release);
  rank_states_[static_cast<size_t>(queue.request.to)]->wake.notify_one();
}

TensorMessage ThreadGroup::State::take_message(ThreadQueue& queue, const std::string& label) {
  const auto may_go_on = [&] {
    return queue.waiting.load(std::memory_order_acquire) > 0 ||
           has_failed_.load(std::memory_order_relaxed);
  };
  for (int look = 0; look < kLooks && !may_go_on(); ++look) spin_pause();
  const int64_t rank = queue.request.to;
  std::unique_lock lock(mutex_);
  rank_states_[static_cast<size_t>(rank)]->wake.wait(lock, may_go_on);
  if (failure_) throw_failure("receive of " + label + " by " + queue.request.name, rank);
  TensorMessage message = std::move(queue.messages.front());
  queue.messages.pop_front();
  queue.waiting.fetch_sub(1, std::memory_order_relaxed);
  return message;
}

void ThreadGroup::State::forget_before(ThreadQueue& queue, int64_t step) {
  const std::lock_guard lock(mutex_);
  while (!queue.messages.empty() && queue.messages.front().step < step) {
    queue.messages.pop_front();
    queue.waiting.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace trireme
