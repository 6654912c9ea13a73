#include <trireme/strategies/remote/ref_exchange.h>

#include <trireme/strategies/remote/remote_module_session.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace trireme::remote {
namespace {

// Posts a message that has neither tensors nor Refs.
bool try_post(MessageBox& box, int64_t to, const Head& head, const Value& value,
              const char* label) {
  TensorMessage message;
  message.text = encode_message(head, value, {}).text;
  return box.try_post(to, message, label);
}

}  // namespace

RefExchange::RefExchange(RankOf where, std::vector<int64_t> sessions,
                         std::shared_ptr<MessageBox> box,
                         std::shared_ptr<DeferredDestruction> deferred)
    : where_(where),
      sessions_(std::move(sessions)),
      box_(std::move(box)),
      deferred_(std::move(deferred)) {}

bool RefExchange::is_in_child() const { return fork_guard_.in_child(); }

void RefExchange::check_session(const RefAddress& address) const {
  const bool is_rank = address.owner >= 0 && address.owner < where_.world;
  TORCH_CHECK_VALUE(
      is_rank && address.session == sessions_[static_cast<size_t>(address.owner)],
      error_text("remote", "got a Ref of an earlier start()", where_, "Make Refs after start()."));
}

Ref::Release RefExchange::releaser() {
  return [exchange = weak_from_this()](const RefAddress& address) {
    if (const auto alive = exchange.lock()) alive->release(address);
  };
}

RefPtr RefExchange::adopt(const RefAddress& address) {
  check_session(address);
  if (address.owner == where_.rank)
    TORCH_CHECK_VALUE(
        table_.hold(address.number, where_.rank),
        error_text("remote", "got a Ref of a dead object of class " + address.class_name, where_,
                   "Keep a Ref as long as others use the object."));
  return std::make_shared<const Ref>(address, releaser());
}

RefPtr RefExchange::show(std::shared_ptr<Hosted> object, const std::string& class_name) {
  const int64_t number = table_.add(std::move(object), class_name, where_.rank);
  return std::make_shared<const Ref>(RefAddress{where_.rank, own_session(), number, class_name},
                                     releaser());
}

std::shared_ptr<Hosted> RefExchange::find(const RefAddress& address) const {
  if (address.owner != where_.rank || address.session != own_session()) return nullptr;
  return table_.find(address.number).object;
}

void RefExchange::release(const RefAddress& address) noexcept {
  if (is_in_child()) return;
  try {
    deferred_->add([exchange = weak_from_this(), address] {
      const auto alive = exchange.lock();
      return !alive || alive->tell_count(address, alive->where_.rank, -1);
    });
  } catch (const std::exception&) {  // no memory: the object stays until its owner stops
  }
}

bool RefExchange::try_lend(const Ref& ref, int64_t to) {
  check_session(ref.address());
  return ref.address().owner == to || tell_count(ref.address(), to, 1);
}

// Changes a count at the owner; returns false if the owner takes no message now.
bool RefExchange::tell_count(const RefAddress& address, int64_t holder, int64_t change) noexcept {
  try {
    if (address.owner != where_.rank)
      return try_post(*box_, address.owner, {MessageKind::kCount, address.number},
                      to_value(CountMessage{holder, change, address.session}), "a count of Refs");
    table_.count(address.number, holder, change);
    clean_later();
  } catch (const std::exception&) {  // the owner is gone, and so is the object
  }
  return true;
}

void RefExchange::drop(const RefAddress& session, int64_t forward) noexcept {
  if (is_in_child()) return;
  try {
    deferred_->add([exchange = weak_from_this(), session, forward] {
      const auto alive = exchange.lock();
      return !alive || alive->tell_drop(session, forward);
    });
  } catch (const std::exception&) {  // no memory: the graph stays as long as its session
  }
}

bool RefExchange::tell_drop(const RefAddress& session, int64_t forward) noexcept {
  try {
    if (session.owner != where_.rank)
      return try_post(*box_, session.owner, {MessageKind::kDrop, session.number}, forward,
                      "the end of a graph");
    take_drop(session.number, forward);
  } catch (const std::exception&) {  // the owner is gone, and so are its graphs
  }
  return true;
}

void RefExchange::take_count(int64_t number, const Value& value) {
  const CountMessage count = count_of(value);
  if (count.session != own_session() || count.holder < 0 || count.holder >= where_.world) return;
  table_.count(number, count.holder, count.change);
  clean_later();
}

void RefExchange::take_drop(int64_t number, const Value& value) {
  const auto* forward = value.get_if<int64_t>();
  if (forward == nullptr) refuse_message("of another form");
  const auto session = std::dynamic_pointer_cast<RemoteModuleSession>(table_.find(number).object);
  if (!session) return;
  deferred_->add([graph = session->drop(*forward)]() mutable {
    graph.reset();
    return true;
  });
}

void RefExchange::forget(int64_t rank) {
  table_.forget(rank);
  clean_later();
}

// Frees objects without Refs on the deferred thread, since that may run user code.
void RefExchange::clean_later() {
  if (!table_.has_gone()) return;
  for (auto& object : table_.take_gone())
    deferred_->add([object = std::move(object)]() mutable {
      object.reset();
      return true;
    });
}

}  // namespace trireme::remote
