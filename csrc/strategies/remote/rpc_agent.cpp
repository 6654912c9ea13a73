#include <trireme/strategies/remote/rpc_agent.h>

#include <trireme/comm/host.h>
#include <trireme/common/duration.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/trace.h>
#include <trireme/shm/host_group.h>
#include <trireme/strategies/remote/agreement.h>
#include <trireme/strategies/remote/failures.h>
#include <trireme/strategies/remote/sendable.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <numeric>
#include <set>
#include <utility>

namespace trireme::remote {
namespace {

using std::chrono::milliseconds;

std::string seconds_of(milliseconds duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g s", static_cast<double>(duration.count()) / 1000);
  return text.data();
}

template <typename T>
void leak(std::shared_ptr<T> object) {
  static_cast<void>(new std::shared_ptr<T>(std::move(object)));
}

}  // namespace

std::shared_ptr<RpcAgent> RpcAgent::start(const std::shared_ptr<Communicator>& communicator,
                                          const std::string& name, int64_t threads) {
  const RankOf where = communicator->rank_of();
  Agreement agreed = agree_on_start(*communicator, {name, threads});
  std::vector<int> ranks(static_cast<size_t>(where.world));
  std::iota(ranks.begin(), ranks.end(), 0);
  // Makes a group of its own, so that a dying rank ends nothing else, and no other group's end ends
  // it.
  auto own = communicator->split(ranks, "remote");
  if (!own)
    C10_THROW_ERROR(NotImplementedError, error_text("remote", "got an engine that makes no groups",
                                                    where, "Use Gloo, NCCL or shared memory."));
  // std::make_shared() cannot call a private constructor.
  std::shared_ptr<RpcAgent> made(new RpcAgent(std::move(own), where));
  made->names_ = std::move(agreed.names);
  made->definitions_ = std::move(agreed.definitions);
  made->box_ = std::make_shared<MessageBox>(*made->communicator_);
  made->deferred_ = std::make_shared<DeferredDestruction>();
  made->refs_ = std::make_shared<RefExchange>(where, agreed.sessions, made->box_, made->deferred_);
  Host* host = made->communicator_->host();
  Source& source = *made;
  Replies& replies = *made;
  made->threads_ = std::make_unique<ServingThreads>(
      source, threads, host != nullptr ? host->group().world() : where.world);
  made->server_ = std::make_unique<CallServer>(replies, made->refs_->table(), *made->threads_,
                                               made->refs_->own_session());
  made->threads_->start();
  return made;
}

RpcAgent::RpcAgent(std::shared_ptr<Communicator> communicator, RankOf where)
    : communicator_(std::move(communicator)),
      where_(where),
      byes_(static_cast<size_t>(where.world)) {
  if (Host* host = communicator_->host()) group_timeout_ = host->group().timeout();
}

RpcAgent::~RpcAgent() {
  if (fork_guard_.in_child()) {  // threads stayed with the parent
    static_cast<void>(server_.release());
    static_cast<void>(threads_.release());
    leak(std::move(refs_));
    leak(std::move(deferred_));
    leak(std::move(box_));
    return;
  }
  close();
}

int64_t RpcAgent::rank_of(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  TORCH_CHECK_VALUE(
      found != names_.end(),
      error_text("remote",
                 "got '" + std::string(name) + "' as callee, expected one of " + list_of(names_),
                 where_, "Pass a name that a rank has given to start()."));
  return found - names_.begin();
}

std::string RpcAgent::name_of(int64_t rank) const {
  return names_.at(static_cast<size_t>(rank)) + " (rank " + std::to_string(rank) + ")";
}

std::vector<std::string> RpcAgent::methods_of(const RefAddress& address) const {
  std::vector<std::string> methods;
  const std::string prefix = address.class_name + ".";
  for (const DefinitionText& definition : definitions_.at(static_cast<size_t>(address.owner)))
    if (definition.kind == "method" && definition.name.rfind(prefix, 0) == 0)
      methods.push_back(definition.name.substr(prefix.size()));
  return methods;
}

void RpcAgent::check_usable() const {
  if (fork_guard_.in_child())
    C10_THROW_ERROR(Error, error_text("remote", "got a call in a forked child", where_,
                                      "Call in the parent only."));
  if (closed_)
    C10_THROW_ERROR(Error, error_text("remote", "got a call after stop()", where_,
                                      "Call before stop(), or start again."));
}

// --- calls of this rank --------------------------------------------------------------------------

PendingCallPtr RpcAgent::begin(CallRequest request) {
  check_usable();
  TRIREME_TRACE("remote_call");
  check_sendable(request.message, reaches_devices(request.to));
  if (threads_->is_exhausted())
    C10_THROW_ERROR(Error,
                    error_text("remote", "got a call while hundreds of calls wait for each other",
                               where_, "Look for calls that go round in circles."));
  auto call = std::make_shared<PendingCall>(
      request.to, what_of(request.message.verb, request.message.name), request.timeout);
  if (const auto why = box_->why_gone(request.to)) {
    call->complete(Unanswered{*why});
    return call;
  }
  request.message.timeout_ms = call->timeout().count();
  const int64_t number = calls_.add(call);
  try {
    EncodedValue message = encode_message({MessageKind::kCall, number},
                                          to_value(std::move(request.message)), address_of());
    lend(message.refs, request.to, call->deadline());
    message.refs.push_back(std::move(request.object));
    call->keep(message.refs);
    if (!post(request.to, {MessageKind::kCall, number}, std::move(message), call->deadline()))
      end_late_calls();
  } catch (const c10::DistBackendError& error) {
    if (calls_.take(number)) call->complete(Unanswered{first_line_of(error)});
  } catch (...) {
    static_cast<void>(calls_.take(number));
    throw;
  }
  return call;
}

Value RpcAgent::finish(const PendingCallPtr& call) {
  if (!call->is_done()) {
    check_usable();
    // Another thread may be about to complete the call, which is soon done.
    while (!threads_->wait([&] { return call->is_done(); }, call->deadline())) end_late_calls();
  }
  const PendingCall::Outcome& outcome = call->outcome();
  if (const auto* value = std::get_if<Value>(&outcome)) return *value;
  if (const auto* failure = std::get_if<Failure>(&outcome)) raise_failure(*failure);
  const auto& lost = std::get<Unanswered>(outcome);
  if (lost.is_late)
    C10_THROW_ERROR(
        DistBackendError,
        error_text("remote", lost.why, where_, "Look at that process, or pass a longer timeout=."));
  const bool is_gone = closed_ || box_->why_gone(call->to());
  C10_THROW_ERROR(
      DistBackendError,
      error_text("remote",
                 call->what() + " at " + name_of(call->to()) + " has no answer: " + lost.why,
                 where_, is_gone ? "Call who is there." : "Then call again."));
}

bool RpcAgent::is_done(const PendingCall& call) {
  if (!call.is_done() && !closed_ && !fork_guard_.in_child()) {
    poll();
    if (call.deadline() <= shm::Clock::now()) end_late_calls();
  }
  return call.is_done();
}

void RpcAgent::end_late_calls() {
  for (const auto& [number, call] : calls_.take_late(shm::Clock::now())) {
    tell_given_up(call->to(), number);
    call->complete(Unanswered{lateness_of(*call), true});
  }
}

// Comes in front of the caller's next call. A callee that takes no messages drops the call at the
// deadline by its own clock.
void RpcAgent::tell_given_up(int64_t to, int64_t number) noexcept {
  try {
    if (to == where_.rank) return server_->forget(to, number);
    TensorMessage message;
    message.text = encode_message({MessageKind::kGivenUp, number}, {}, address_of()).text;
    static_cast<void>(box_->try_post(to, message, "a call that was given up"));
  } catch (const std::exception&) {  // the callee is gone
  }
}

std::string RpcAgent::lateness_of(const PendingCall& call) const {
  const std::string state = box_->state_of(call.to());
  return name_of(call.to()) + " has not answered within " + seconds_of(call.timeout()) +
         (state.empty() ? " in " : "; it is " + state + ", in ") + call.what();
}

// --- Refs ----------------------------------------------------------------------------------------

AddressOf RpcAgent::address_of() const {
  return [](const Ref& ref) { return ref.address(); };
}

Value RpcAgent::read(const TensorMessage& message) {
  return read_value(message.text, message.tensors,
                    [this](const RefAddress& address) { return refs_->adopt(address); });
}

RefPtr RpcAgent::show(std::shared_ptr<Hosted> object, const std::string& class_name) {
  check_usable();
  return refs_->show(std::move(object), class_name);
}

std::shared_ptr<Hosted> RpcAgent::find(const RefAddress& address) const {
  return refs_->find(address);
}

void RpcAgent::drop(const RefAddress& session, int64_t forward) noexcept {
  refs_->drop(session, forward);
}

void RpcAgent::lend(const std::vector<RefPtr>& refs, int64_t to, shm::Clock::time_point until) {
  for (const RefPtr& ref : refs) {
    const int64_t owner = ref->address().owner;
    while (!refs_->try_lend(*ref, to))
      if (!threads_->wait([&] { return box_->has_room(owner); }, until))
        C10_THROW_ERROR(DistBackendError, name_of(owner) + ", who owns a Ref, takes no messages");
  }
}

// --- messages ------------------------------------------------------------------------------------

// Returns false if the receiver takes nothing before `until`.
bool RpcAgent::post(int64_t to, const Head& head, EncodedValue message,
                    shm::Clock::time_point until) {
  TensorMessage posted;
  posted.text = std::move(message.text);
  posted.tensors = std::move(message.tensors);
  for (at::Tensor& tensor : posted.tensors)
    if (tensor.requires_grad()) tensor = tensor.detach();
  if (to == where_.rank) {  // values are copied, as everywhere
    for (at::Tensor& tensor : posted.tensors) tensor = tensor.clone();
    handle({to, std::move(posted)});
    box_->wake();
    return true;
  }
  const char* label = head.kind == MessageKind::kCall ? "a call" : "an answer";
  while (!box_->try_post(to, posted, label))
    if (!threads_->wait([&] { return box_->has_room(to); }, until)) return false;
  return true;
}

bool RpcAgent::reaches_devices(int64_t rank) const {
  return rank == where_.rank || box_->reaches_devices(rank);
}

bool RpcAgent::reply(int64_t to, const Head& head, const Value& value,
                     shm::Clock::time_point until) {
  EncodedValue message = encode_message(head, value, address_of());
  lend(message.refs, to, until);
  return post(to, head, std::move(message), until);
}

bool RpcAgent::poll() {
  const std::unique_lock lock(polling_, std::try_to_lock);
  if (!lock) return false;
  std::vector<MessageBox::Arrival> arrivals = box_->take_arrivals();
  if (arrivals.empty()) return false;
  heard_ = shm::Clock::now().time_since_epoch().count();
  for (MessageBox::Arrival& arrival : arrivals) {
    try {
      handle(std::move(arrival));
    } catch (const std::exception&) {
      // No rank of ours sends such bytes. A call that they were meant for ends at its deadline.
    }
  }
  box_->wake();
  return true;
}

void RpcAgent::look() {
  for (const int64_t rank : box_->look()) forget(rank);
  end_late_calls();
  deferred_->look();
}

// Ends the calls and Refs of a rank that is gone, and nothing else.
void RpcAgent::forget(int64_t rank) {
  calls_.lose(rank, box_->why_gone(rank).value_or("it is gone"));
  server_->forget(rank);
  refs_->forget(rank);
  box_->wake();
}

void RpcAgent::handle(MessageBox::Arrival arrival) {
  const Head head = read_head(arrival.message.text);
  switch (head.kind) {
    case MessageKind::kCall:
      return handle_call(arrival.from, head.number, arrival.message);
    case MessageKind::kAnswer:
    case MessageKind::kFailure:
      return handle_answer(head.kind, arrival.from, head.number, arrival.message);
    case MessageKind::kGivenUp:
      return server_->forget(arrival.from, head.number);
    case MessageKind::kCount:
      return refs_->take_count(head.number, read(arrival.message));
    case MessageKind::kDrop:
      return refs_->take_drop(head.number, read(arrival.message));
    case MessageKind::kBye:
      byes_[static_cast<size_t>(arrival.from)] = true;
  }
}

void RpcAgent::handle_call(int64_t from, int64_t number, const TensorMessage& message) {
  ServedCall call{from, number, {}, "a call", nullptr, {}};
  std::exception_ptr error;
  try {
    call.call = call_of(read(message));
    call.what = what_of(call.call.verb, call.call.name);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  const int64_t timeout = call.call.timeout_ms;
  call.deadline = deadline_after(timeout < 0 ? group_timeout_ : milliseconds(timeout));
  if (!error) return server_->take(std::move(call));
  threads_->run([this, call = std::move(call), error] { server_->fail(call, error); });
}

void RpcAgent::handle_answer(MessageKind kind, int64_t from, int64_t number,
                             const TensorMessage& message) {
  // The answer is read in any case: this rank has to drop the Refs in it.
  PendingCall::Outcome outcome;
  try {
    Value value = read(message);
    kind == MessageKind::kAnswer ? static_cast<void>(outcome = std::move(value))
                                 : static_cast<void>(outcome = failure_of(value));
  } catch (const std::exception& error) {
    outcome = Unanswered{"its answer cannot be read: " + first_line_of(error)};
  }
  const PendingCallPtr call = calls_.take(number);
  if (call && call->to() == from) call->complete(std::move(outcome));
}

// --- the end -------------------------------------------------------------------------------------

// Returns the other live ranks for which `has` returns false.
std::vector<int64_t> RpcAgent::others_without(const std::function<bool(int64_t rank)>& has) const {
  std::vector<int64_t> found;
  for (int64_t rank = 0; rank < where_.world; ++rank)
    if (rank != where_.rank && !box_->why_gone(rank) && !has(rank)) found.push_back(rank);
  return found;
}

// Calls `tell` for each other live rank; `tell` returns false to be called again.
void RpcAgent::tell_others(const std::function<bool(int64_t rank)>& tell) {
  std::set<int64_t> told;
  const auto has_told = [&](int64_t rank) {
    if (told.contains(rank)) return true;
    try {
      if (!tell(rank)) return false;
    } catch (const c10::DistBackendError&) {  // it is gone
    }
    return told.insert(rank).second;
  };
  wait_while_heard("tell the others", [&] { return others_without(has_told).empty(); });
}

// Waits until `enough` returns true; throws if no message has come for as long as the group's
// timeout.
void RpcAgent::wait_while_heard(const char* what, const std::function<bool()>& enough) {
  heard_ = shm::Clock::now().time_since_epoch().count();
  for (;;) {
    const shm::Clock::time_point heard{shm::Clock::duration(heard_)};
    const shm::Clock::time_point until = heard + group_timeout_;
    if (threads_->rest(enough, until)) return;
    if (shm::Clock::time_point{shm::Clock::duration(heard_)} > heard) continue;
    std::string names;
    for (const int64_t rank : others_without([&](int64_t peer) { return byes_[peer].load(); }))
      names += (names.empty() ? "" : ", ") + name_of(rank);
    C10_THROW_ERROR(DistBackendError,
                    error_text("remote",
                               "got no stop() of " + (names.empty() ? "this rank's jobs" : names) +
                                   " within " + seconds_of(group_timeout_) + ": waited to " + what,
                               where_, "Call stop() on every rank."));
  }
}

void RpcAgent::stop() {
  check_usable();
  try {
    wait_while_heard("have all calls answered", [&] { return calls_.is_empty(); });
    const EncodedValue bye = encode_message({MessageKind::kBye, 0}, {}, address_of());
    TensorMessage message;
    message.text = bye.text;
    tell_others([&](int64_t rank) { return box_->try_post(rank, message, "stop()"); });
    wait_while_heard("hear the others", [&] {
      return others_without([&](int64_t rank) { return byes_[rank].load(); }).empty() &&
             calls_.is_empty() && threads_->is_idle();
    });
    if (const auto failure = box_->failure())
      C10_THROW_ERROR(DistBackendError,
                      error_text("remote", "ended before all ranks have called stop(): " + *failure,
                                 where_, "Look for the error of that rank."));
    wait_while_heard("tell of Refs", [&] { return deferred_->is_idle(); });
    closed_ = true;
    deferred_->stop();
    tell_others([&](int64_t rank) { return box_->try_end(rank); });
    wait_while_heard("hear the end of the others", [&] {
      return others_without([&](int64_t rank) { return box_->has_ended(rank); }).empty() &&
             box_->is_drained();
    });
  } catch (...) {
    closed_ = true;
    leave("this rank's stop() has failed");
    throw;
  }
  close();
}

void RpcAgent::close() {
  closed_ = true;
  calls_.lose_all("this rank has called stop()");
  if (threads_) threads_->stop();
  if (deferred_) deferred_->stop();
  if (refs_) refs_->table().take_all();  // may run user code
}

void RpcAgent::abandon(const std::string& why) noexcept {
  if (!closed_.exchange(true) && !fork_guard_.in_child()) leave(why);
}

// Ends this rank's calls, and waits for no other rank.
void RpcAgent::leave(const std::string& why) noexcept {
  try {
    calls_.lose_all(why);
    threads_->leave();
    // Threads may be in user code for ever, and use this object.
    leak(shared_from_this());
  } catch (const std::exception&) {  // no memory, at the end of the process
  }
}

}  // namespace trireme::remote
