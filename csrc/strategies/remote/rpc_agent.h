#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/strategies/remote/call_server.h>
#include <trireme/strategies/remote/deferred_destruction.h>
#include <trireme/strategies/remote/definitions.h>
#include <trireme/strategies/remote/pending_call.h>
#include <trireme/strategies/remote/ref_exchange.h>
#include <trireme/strategies/remote/serving_threads.h>
#include <trireme/strategies/remote/value.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::remote {

// A rank's request to another one.
struct CallRequest {
  int64_t to = 0;
  CallMessage message = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  RefPtr object = {};  // kept until the answer

  // Makes this a call of an object, at its owner.
  void call_object(RefPtr ref) {
    to = ref->address().owner;
    message.object = ref->address().number;
    message.session = ref->address().session;
    object = std::move(ref);
  }
};

// Sends calls and answers, and serves the calls of others. Thread-safe, but for stop().
class TRIREME_API RpcAgent final : private Source,
                                   private Replies,
                                   public std::enable_shared_from_this<RpcAgent> {
 public:
  // Collective. Throws c10::ValueError on all ranks alike for names that are equal or empty, fewer
  // than one thread, and definitions that differ or are doubled.
  static std::shared_ptr<RpcAgent> start(const std::shared_ptr<Communicator>& communicator,
                                         const std::string& name, int64_t threads);
  ~RpcAgent() override;

  RankOf where() const { return where_; }
  const std::vector<std::string>& names() const { return names_; }
  // Throws c10::ValueError for a name that no rank has.
  int64_t rank_of(std::string_view name) const;
  // Returns "p1 (rank 1)".
  std::string name_of(int64_t rank) const;
  // Returns the names of the methods that the owner has defined for the address's class.
  std::vector<std::string> methods_of(const RefAddress& address) const;

  // Sends a call. If the callee is gone, or takes no message before the deadline, the call has
  // ended when this returns. Throws c10::Error after stop() and in a forked child.
  PendingCallPtr begin(CallRequest request);
  // Waits for the answer, until the call's deadline. Throws the call's exception.
  Value finish(const PendingCallPtr& call);
  bool is_done(const PendingCall& call);

  // Returns a Ref to an object of this rank.
  RefPtr show(std::shared_ptr<Hosted> object, const std::string& class_name) override;
  // Returns an object of this rank; null for one of another rank, or of an earlier start.
  std::shared_ptr<Hosted> find(const RefAddress& address) const;
  // Lets the owner of a session forget a forward. Never throws.
  void drop(const RefAddress& session, int64_t forward) noexcept;

  // Collective: serves until all live ranks have called it. Throws c10::DistBackendError naming the
  // missing ranks, if the others were silent for as long as the group's timeout; then this rank
  // serves no more.
  void stop();
  // Ends without the others, at the end of a process. Never throws.
  void abandon(const std::string& why) noexcept;
  // Throws c10::Error after stop() and in a forked child.
  void check_usable() const;

 private:
  RpcAgent(std::shared_ptr<Communicator> communicator, RankOf where);

  bool poll() override;
  void look() override;
  shm::Futex& futex() override { return box_->futex(); }
  bool reply(int64_t to, const Head& head, const Value& value,
             shm::Clock::time_point until) override;
  std::string name_of_own() const override { return name_of(where_.rank); }
  bool reaches_devices(int64_t rank) const override;

  AddressOf address_of() const;
  Value read(const TensorMessage& message);
  void lend(const std::vector<RefPtr>& refs, int64_t to, shm::Clock::time_point until);

  bool post(int64_t to, const Head& head, EncodedValue message, shm::Clock::time_point until);
  void handle(MessageBox::Arrival arrival);
  void handle_call(int64_t from, int64_t number, const TensorMessage& message);
  void handle_answer(MessageKind kind, int64_t from, int64_t number, const TensorMessage& message);

  void forget(int64_t rank);
  void end_late_calls();
  void tell_given_up(int64_t to, int64_t number) noexcept;
  std::string lateness_of(const PendingCall& call) const;
  std::vector<int64_t> others_without(const std::function<bool(int64_t rank)>& has) const;
  void tell_others(const std::function<bool(int64_t rank)>& tell);
  void wait_while_heard(const char* what, const std::function<bool()>& enough);
  void close();
  void leave(const std::string& why) noexcept;

  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  ForkGuard fork_guard_;
  std::vector<std::string> names_;
  std::vector<std::vector<DefinitionText>> definitions_;
  std::chrono::milliseconds group_timeout_ = PendingCall::kUsualTimeout;

  PendingCalls calls_;
  std::shared_ptr<MessageBox> box_;
  std::shared_ptr<DeferredDestruction> deferred_;
  std::shared_ptr<RefExchange> refs_;
  std::unique_ptr<ServingThreads> threads_;
  std::unique_ptr<CallServer> server_;
  std::mutex polling_;
  std::atomic<shm::Clock::rep> heard_{0};  // when the last message came
  std::vector<std::atomic<bool>> byes_;    // [rank]
  std::atomic<bool> closed_{false};        // no new call of this rank begins
};

}  // namespace trireme::remote
