#include <trireme/comm/hosts/host_leg.h>

#include <trireme/common/exception_text.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme {
namespace {

using std::chrono::milliseconds;

constexpr int kTag = 0;  // one for all: order tells messages apart

c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                          const HostLayout& layout, const GlooOptions& options) {
  const std::string prefix = "leg/" + std::to_string(layout.place);
  return make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>(prefix, store),
                           {layout.host, layout.count()}, options);
}

}  // namespace

HostLeg::HostLeg(const c10::intrusive_ptr<c10d::Store>& store, const HostLayout& layout,
                 const GlooOptions& options, Pointless pointless)
    : layout_(layout),
      gloo_(connect(store, layout, options)),
      pointless_(std::move(pointless)),
      connections_([this](int64_t host) { return post_unanswered(host); }),
      watcher_([this] { keep_watch(); }) {}

HostLeg::~HostLeg() {
  if (fork_guard_.in_child()) {  // all threads stayed with the parent
    gloo_.release();
    watcher_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

void HostLeg::keep_watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    changed_.wait_for(lock, shm::kLookEvery);
    if (awaited_ == nullptr) {
      watcher_sleeps_ = true;
      changed_.wait(lock, [this] { return awaited_ != nullptr || ending_; });
      watcher_sleeps_ = false;
      continue;
    }
    const int64_t host = awaited_->host;
    lock.unlock();
    const std::string why_broken = connections_.why_broken(host);
    if (pointless_()) close();
    lock.lock();
    if (why_broken.empty() || awaited_ == nullptr || awaited_->host != host) continue;
    why_broken_ = why_broken;
    awaited_->work->abort();
  }
}

c10::intrusive_ptr<c10d::Work> HostLeg::post_unanswered(int64_t host) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!gloo_) return {};
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  return gloo_->recv(nothing, static_cast<int>(host), kTag + kUnansweredTagOffset);
}

HostLeg::Flight::Flight(HostLeg* leg) : leg_(leg) {
  if (leg_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(leg_->mutex_);
  leg_->flights_.insert(this);
}

HostLeg::Flight::~Flight() {
  if (leg_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(leg_->mutex_);
  leg_->flights_.erase(this);
  messages_.clear();  // Gloo lets go of their memory here
}

void HostLeg::send(Flight& flight, int64_t host, const std::byte* data, int64_t bytes) {
  post(flight, host, const_cast<std::byte*>(data), bytes, true);
}

void HostLeg::recv(Flight& flight, int64_t host, std::byte* data, int64_t bytes) {
  post(flight, host, data, bytes, false);
}

void HostLeg::post(Flight& flight, int64_t host, std::byte* data, int64_t bytes, bool sends) {
  if (bytes == 0) return;
  std::vector<at::Tensor> message{at::from_blob(data, {bytes}, at::kByte)};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!gloo_) throw LegBroken("the connection to " + name_of(host) + " is closed");
  try {
    const int peer = static_cast<int>(host);
    flight.messages_.push_back(
        {sends ? gloo_->send(message, peer, kTag) : gloo_->recv(message, peer, kTag), host});
  } catch (const std::exception& error) {
    throw LegBroken("no message could pass to " + name_of(host) + ": " + first_line_of(error));
  }
}

void HostLeg::land(Flight& flight, shm::Clock::time_point deadline) {
  for (const Flight::Message& message : flight.messages_) {
    const std::string why = wait_for(message, deadline);
    if (why.empty()) continue;
    const bool late = shm::Clock::now() >= deadline;
    throw LegBroken(name_of(message.host) +
                    (late ? " has not come in time" : " no longer answers") + " (" + why + ")");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  flight.messages_.clear();
}

// Returns why the message has not come, or was not sent; "" if it was.
std::string HostLeg::wait_for(const Flight::Message& message, shm::Clock::time_point deadline) {
  show_awaited(&message);
  const auto left = std::chrono::ceil<milliseconds>(deadline - shm::Clock::now());
  std::string why;
  try {
    if (!message.work->wait(std::max(left, milliseconds(1))) && !is_through(*message.work))
      why = "it was given up";
  } catch (const std::exception& error) {
    why = first_line_of(error);
  }
  show_awaited(nullptr);
  return why.empty() || why_broken_.empty() ? why : why_broken_;
}

void HostLeg::show_awaited(const Flight::Message* message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  awaited_ = message;
  if (message == nullptr) return;
  why_broken_.clear();
  if (watcher_sleeps_) changed_.notify_all();
}

void HostLeg::close() noexcept {
  if (fork_guard_.in_child()) return;
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const Flight* flight : flights_)
        for (const Flight::Message& message : flight->messages_) message.work->abort();
      gloo_.reset();
    }
    connections_.forget();
  } catch (const std::exception& error) {  // the connection is gone anyway
    TORCH_WARN("closing a connection between hosts: ", first_line_of(error));
  }
}

std::string HostLeg::name_of(int64_t host) const {
  const int64_t rank = layout_.ranks_of(host)[static_cast<size_t>(layout_.place)];
  return "rank " + std::to_string(rank) + " on another host";
}

}  // namespace trireme
