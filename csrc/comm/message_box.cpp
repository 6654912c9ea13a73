#include <trireme/comm/message_box.h>

#include <trireme/comm/host.h>
#include <trireme/comm/make_channels.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/shm/host_group.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace trireme {
namespace {

constexpr const char* kBoxArea = "message_box";
constexpr int64_t kMessages = 256;  // that a lane holds
// Lets a call without tensors through, and an error that says why a larger message has no slot.
constexpr int64_t kReserveBytes = 8 << 10;
// The most bytes in flight over an engine, which does not tell what has arrived.
constexpr int64_t kBytesByEngine = 4 << 20;
// Tensors of a message up to this size are copied: its slot is free at once, and a queue of many
// such messages takes no slot, and no file, each.
constexpr size_t kSmallBytes = 64 << 10;
constexpr std::chrono::seconds kSayAliveEvery{1};
// Peers silent for so long get no heartbeat: messages that they do not take would fill their lane.
constexpr std::chrono::seconds kSilent{10};

void own_small_tensors(TensorMessage& message) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : message.tensors)
    if (tensor.defined()) bytes += tensor.nbytes();
  if (bytes > kSmallBytes) return;
  for (at::Tensor& tensor : message.tensors)
    if (tensor.defined()) tensor = tensor.clone();
}

// The only messages that the box itself sends; no other message without tensors has such a text.
constexpr std::string_view kHeartbeat{
    "\xff"
    "alive"};
constexpr std::string_view kEnd{
    "\xff"
    "end"};

bool says(const TensorMessage& message, std::string_view text) {
  return message.tensors.empty() && message.text == text;
}

[[noreturn]] void refuse_gone(const std::string& why, const std::string& label, RankOf where) {
  C10_THROW_ERROR(DistBackendError, error_text(kBoxArea, "cannot post " + label + ": " + why, where,
                                               "Call who is there."));
}

}  // namespace

struct MessageBox::Lane {
  int64_t rank = 0;
  int64_t place = -1;  // in this rank's host; -1 on another one
  TensorSender* sender = nullptr;
  TensorReceiver* receiver = nullptr;
  bool by_engine = false;
  std::shared_ptr<TensorChannels> channels;  // the thread may outlive the box
  std::thread thread;
  std::atomic<shm::Clock::rep> heard{0};
  std::atomic<bool> ended{false};  // the peer posts no more
  bool was_reported = false;       // guarded by taking_

  mutable std::mutex mutex;  // guards the sender, and what follows
  bool end_was_posted = false;
  std::string why_gone;
};

struct MessageBox::Inbox {
  std::mutex mutex;
  std::deque<Arrival> arrivals;
  shm::Futex* futex = nullptr;  // null once the box is gone
};

MessageBox::MessageBox(Communicator& communicator)
    : where_(communicator.rank_of()),
      communicator_(communicator),
      lanes_(static_cast<size_t>(where_.world)),
      inbox_(std::make_shared<Inbox>()),
      own_futex_(std::make_unique<shm::Futex>()),
      futex_(own_futex_.get()) {
  std::vector<ChannelRequest> requests;
  for (int64_t from = 0; from < where_.world; ++from)
    for (int64_t to = 0; to < where_.world; ++to)
      if (from != to)
        requests.push_back({from, to, kMessages,
                            "box " + std::to_string(from) + " to " + std::to_string(to),
                            kBytesByEngine, true, kReserveBytes});
  if (!requests.empty()) channels_ = make_channels(communicator, requests);
  connect(requests);
}

void MessageBox::connect(const std::vector<ChannelRequest>& requests) {
  Host* host = communicator_.host();
  shm::HostGroup* group = host != nullptr && host->group().has_memory() ? &host->group() : nullptr;
  if (group != nullptr) futex_ = &group->block(group->rank()).futex;
  inbox_->futex = futex_;
  for (int64_t rank = 0; rank < where_.world; ++rank) {
    if (rank == where_.rank) continue;
    auto lane = std::make_shared<Lane>();
    lane->rank = rank;
    lane->channels = channels_;
    if (group != nullptr) {
      const auto& members = group->members();
      const auto found = std::find(members.begin(), members.end(), rank);
      if (found != members.end()) lane->place = found - members.begin();
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      const ChannelRequest& request = requests[i];
      if (request.from == where_.rank && request.to == rank) lane->sender = channels_->sender(i);
      if (request.from == rank && request.to == where_.rank)
        lane->receiver = channels_->receiver(i);
    }
    lane->by_engine = !lane->receiver->has_message().has_value();
    lane->heard = shm::Clock::now().time_since_epoch().count();
    if (lane->by_engine)
      lane->thread = std::thread([lane, inbox = inbox_] { receive_all(*lane, *inbox); });
    lanes_[static_cast<size_t>(rank)] = std::move(lane);
  }
}

MessageBox::~MessageBox() {
  end_silent_lanes();
  {
    const std::lock_guard lock(inbox_->mutex);
    inbox_->futex = nullptr;
  }
  for (const auto& lane : lanes_) {
    if (!lane || !lane->thread.joinable()) continue;
    if (lane->ended) {
      lane->thread.join();
    } else {
      lane->thread.detach();
    }
  }
}

// Ends lanes that nothing has ended, such as those between ranks that exchange no messages. Two
// threads that wait for each other's message would keep the group, and its memory, for ever.
void MessageBox::end_silent_lanes() noexcept {
  for (const auto& lane : lanes_) {
    if (!lane || !lane->by_engine) continue;
    try {
      try_end(lane->rank);
    } catch (const std::exception&) {  // it is gone: so its end of the lane is closed
    }
  }
}

void MessageBox::receive_all(Lane& lane, Inbox& inbox) {
  while (!lane.ended) {
    Arrival arrival{lane.rank, {}};
    try {
      arrival.message = lane.receiver->receive(0, 0, "a message");
      lane.receiver->done_with_one();
    } catch (const std::exception& error) {
      const std::lock_guard lock(lane.mutex);
      if (lane.why_gone.empty()) lane.why_gone = first_line_of(error);
      lane.ended = true;
    }
    lane.heard = shm::Clock::now().time_since_epoch().count();
    const std::lock_guard lock(inbox.mutex);
    const bool is_for_box = lane.ended || says(arrival.message, kHeartbeat);
    if (!is_for_box) inbox.arrivals.push_back(std::move(arrival));
    if (inbox.futex == nullptr) return;
    shm::ring(*inbox.futex);
    if (!is_for_box && says(inbox.arrivals.back().message, kEnd)) return;
  }
}

bool MessageBox::try_post(int64_t to, const TensorMessage& message, const std::string& label) {
  return try_send(*lanes_[static_cast<size_t>(to)], message, label);
}

bool MessageBox::try_send(Lane& lane, const TensorMessage& message, const std::string& label) {
  const std::lock_guard lock(lane.mutex);
  if (!lane.why_gone.empty()) refuse_gone(lane.why_gone, label, where_);
  if (lane.end_was_posted) {
    if (says(message, kEnd) || says(message, kHeartbeat)) return true;
    refuse_gone("this rank has posted its last message there", label, where_);
  }
  if (!lane.sender->has_room()) return false;
  try {
    lane.sender->send(message, label);
  } catch (const c10::DistBackendError&) {
    if (!lane.sender->may_find_memory()) throw;
    return false;
  }
  lane.end_was_posted = says(message, kEnd);
  return true;
}

bool MessageBox::has_room(int64_t to) const {
  const Lane& lane = *lanes_[static_cast<size_t>(to)];
  const std::lock_guard lock(lane.mutex);
  return !lane.why_gone.empty() || lane.sender->has_room();
}

bool MessageBox::reaches_devices(int64_t to) const {
  return lanes_[static_cast<size_t>(to)]->by_engine;
}

bool MessageBox::try_end(int64_t to) {
  TensorMessage message;
  message.text = kEnd;
  return try_send(*lanes_[static_cast<size_t>(to)], message, "the last message");
}

bool MessageBox::has_ended(int64_t rank) const { return lanes_[static_cast<size_t>(rank)]->ended; }

std::vector<MessageBox::Arrival> MessageBox::take_arrivals() {
  std::vector<Arrival> arrivals;
  const std::lock_guard lock(taking_);
  for (const auto& lane : lanes_)
    if (lane && !lane->by_engine) take_of(*lane, arrivals);
  std::deque<Arrival> received;
  if (std::any_of(lanes_.begin(), lanes_.end(),
                  [](const auto& lane) { return lane && lane->by_engine; })) {
    const std::lock_guard inbox(inbox_->mutex);
    received.swap(inbox_->arrivals);
  }
  for (Arrival& arrival : received) {
    if (says(arrival.message, kEnd)) {
      lanes_[static_cast<size_t>(arrival.from)]->ended = true;
    } else {
      arrivals.push_back(std::move(arrival));
    }
  }
  return arrivals;
}

// Ends the lane if a message cannot be received: its rank has gone with the message on its way.
void MessageBox::take_of(Lane& lane, std::vector<Arrival>& arrivals) {
  try {
    while (!lane.ended && lane.receiver->has_message().value_or(false)) {
      Arrival arrival{lane.rank, lane.receiver->receive(0, 0, "a message")};
      own_small_tensors(arrival.message);
      lane.receiver->done_with_one();  // its slot is free by now
      if (says(arrival.message, kEnd)) {
        lane.ended = true;
      } else if (!says(arrival.message, kHeartbeat)) {
        arrivals.push_back(std::move(arrival));
      }
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(lane.mutex);
    lane.ended = true;
    if (lane.why_gone.empty()) lane.why_gone = first_line_of(error);
  }
}

// Returns whether a message of that rank is there to be taken. Over an engine all messages are
// there once the lane's thread has said why the rank is gone.
bool MessageBox::has_arrived(const Lane& lane) const {
  if (!lane.by_engine) return !lane.ended && lane.receiver->has_message().value_or(false);
  const std::lock_guard lock(inbox_->mutex);
  return std::any_of(inbox_->arrivals.begin(), inbox_->arrivals.end(),
                     [&](const Arrival& arrival) { return arrival.from == lane.rank; });
}

void MessageBox::wake() { shm::ring(*futex_); }

std::vector<int64_t> MessageBox::look() {
  say_alive();
  std::vector<int64_t> gone;
  const std::string failure = this->failure().value_or("");
  const std::lock_guard taking(taking_);
  for (const auto& lane : lanes_) {
    if (!lane || lane->was_reported) continue;
    std::string absence;
    if (lane->place >= 0)  // a rank that has told of a failure may be gone by now
      absence = failure.empty() ? communicator_.host()->group().absence_of(lane->place) : failure;
    const std::lock_guard lock(lane->mutex);
    if (lane->why_gone.empty() && absence.empty()) continue;
    if (has_arrived(*lane)) continue;  // messages posted before it went count
    if (lane->why_gone.empty()) lane->why_gone = absence;
    lane->was_reported = true;
    gone.push_back(lane->rank);
  }
  return gone;
}

std::optional<std::string> MessageBox::why_gone(int64_t rank) const {
  const auto& lane = lanes_[static_cast<size_t>(rank)];
  if (!lane) return std::nullopt;
  const std::lock_guard lock(lane->mutex);
  if (lane->why_gone.empty()) return std::nullopt;
  return lane->why_gone;
}

std::optional<std::string> MessageBox::failure() const {
  Host* host = communicator_.host();
  return host != nullptr ? host->group().failure() : std::nullopt;
}

std::string MessageBox::state_of(int64_t rank) const {
  const auto& lane = lanes_[static_cast<size_t>(rank)];
  if (!lane || lane->place < 0) return {};
  const shm::RankBlock& block = communicator_.host()->group().block(lane->place);
  const std::string state = shm::PeerProcess(block.pid).state();
  return state == "gone" ? state : "alive (" + state + ")";
}

bool MessageBox::is_drained() {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    if (!lane) return true;
    const std::lock_guard lock(lane->mutex);
    try {
      return !lane->why_gone.empty() || lane->sender->is_drained();
    } catch (const std::exception& error) {
      lane->why_gone = first_line_of(error);
      return true;
    }
  });
}

void MessageBox::say_alive() {
  const shm::Clock::rep now = shm::Clock::now().time_since_epoch().count();
  const auto as_ticks = [](auto duration) { return shm::Clock::duration(duration).count(); };
  shm::Clock::rep said = said_alive_;
  if (now - said < as_ticks(kSayAliveEvery) || !said_alive_.compare_exchange_strong(said, now))
    return;
  TensorMessage message;
  message.text = kHeartbeat;
  for (const auto& lane : lanes_) {
    if (!lane || !lane->by_engine || lane->ended || now - lane->heard > as_ticks(kSilent)) continue;
    try {
      try_send(*lane, message, "that this rank is there");
    } catch (const std::exception& error) {
      const std::lock_guard lock(lane->mutex);
      if (lane->why_gone.empty()) lane->why_gone = first_line_of(error);
    }
  }
}

}  // namespace trireme
