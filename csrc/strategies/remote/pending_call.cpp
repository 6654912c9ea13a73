#include <trireme/strategies/remote/pending_call.h>

#include <trireme/common/duration.h>

#include <utility>

namespace trireme::remote {

PendingCall::PendingCall(int64_t to, std::string what,
                         std::optional<std::chrono::milliseconds> timeout)
    : to_(to),
      what_(std::move(what)),
      timeout_(timeout.value_or(kUsualTimeout)),
      deadline_(deadline_after(timeout_)) {}

void PendingCall::complete(Outcome outcome) {
  outcome_ = std::move(outcome);
  refs_.clear();
  done_.store(true, std::memory_order_seq_cst);
}

std::vector<std::pair<int64_t, PendingCallPtr>> PendingCalls::take_late(
    shm::Clock::time_point now) {
  return take_if([&](const PendingCall& call) { return call.deadline() <= now; });
}

void PendingCalls::lose(int64_t to, const std::string& why) {
  for (const auto& [number, call] :
       take_if([&](const PendingCall& call) { return call.to() == to; }))
    call->complete(Unanswered{why});
}

void PendingCalls::lose_all(const std::string& why) {
  for (const auto& [number, call] : take_if([](const PendingCall&) { return true; }))
    call->complete(Unanswered{why});
}

}  // namespace trireme::remote
