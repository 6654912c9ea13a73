#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace trireme {

// [Note: lanes of a message box]
//
// A box posts to any rank and takes from any rank, in no order but that of a pair: there is a lane,
// a tensor_channel.h, from each rank to each other one. Through the memory of a host, a thread that
// takes looks at all lanes, and sleeps on the futex of this rank, which each sender rings. Over an
// engine a thread per lane receives, puts each message where take_arrivals() finds it, and rings
// the same futex. An engine gives a receive up after its timeout, so each box sends its peers a
// heartbeat every second.

// Sends messages to any rank, and takes messages from any. Nothing here waits. Thread-safe.
class TRIREME_API MessageBox {
 public:
  // The communicator is used by nothing else and outlives the box. Collective; throws what
  // make_channels() does. Memory per pair of ranks: 34 KiB each way, and what its messages take.
  explicit MessageBox(Communicator& communicator);
  // A thread whose rank has not posted its last message is left behind: no engine ends a receive.
  ~MessageBox();
  MessageBox(const MessageBox&) = delete;
  MessageBox& operator=(const MessageBox&) = delete;

  // Copies a message into the lane to another rank: its tensors may be written again. Returns false
  // if the lane has no room (over an engine it waits then, as long as the group's timeout says).
  // Throws c10::DistBackendError if that rank is gone, and TypeError for tensors that cannot be
  // sent.
  bool try_post(int64_t to, const TensorMessage& message, const std::string& label);
  bool has_room(int64_t to) const;
  // Returns whether messages to a rank may have tensors on devices.
  bool reaches_devices(int64_t to) const;

  struct Arrival {
    int64_t from = 0;
    TensorMessage message = {};
  };
  // Returns the messages that have come, those of one rank in the order of posting. Small tensors
  // have memory of their own; a larger one keeps the sender's memory.
  std::vector<Arrival> take_arrivals();

  // Returns the futex that is rung when a message has come, or a lane has room. wake() rings it.
  shm::Futex& futex() { return *futex_; }
  void wake();

  // Checks whether the other ranks are still there. Called every shm::kLookEvery by a thread that
  // waits. Returns the ranks that are gone since the last call, once all their messages were taken.
  std::vector<int64_t> look();
  // Returns why nothing can be posted to a rank: "p1 has died: ..."; nothing while it is there.
  std::optional<std::string> why_gone(int64_t rank) const;
  // Returns why no message passes between the ranks of this host any more, all of which may be
  // there: "rank 1 says: cannot see what rank 0 sends: ..."; nothing while they do.
  std::optional<std::string> failure() const;
  // Returns the state of a rank that does not answer: "alive (stopped)"; "" if it is not known.
  std::string state_of(int64_t rank) const;
  // Posts the last message to a rank, which takes none after it. Returns false as try_post() does.
  bool try_end(int64_t to);
  // Returns whether that rank has posted its last message, and all before it were taken.
  bool has_ended(int64_t rank) const;

  // Returns false while a rank that is still there has not taken all that was posted to it;
  // messages not taken are lost with the box. May wait as TensorSender::is_drained() does.
  bool is_drained();

 private:
  struct Lane;
  struct Inbox;
  void end_silent_lanes() noexcept;
  static void receive_all(Lane& lane, Inbox& inbox);
  void connect(const std::vector<ChannelRequest>& requests);
  bool try_send(Lane& lane, const TensorMessage& message, const std::string& label);
  void take_of(Lane& lane, std::vector<Arrival>& arrivals);
  bool has_arrived(const Lane& lane) const;
  void say_alive();

  RankOf where_;
  Communicator& communicator_;
  std::shared_ptr<TensorChannels> channels_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // [rank]; null for this one
  std::shared_ptr<Inbox> inbox_;              // for engines
  std::unique_ptr<shm::Futex> own_futex_;     // where there is no host
  shm::Futex* futex_ = nullptr;
  std::mutex taking_;
  std::atomic<shm::Clock::rep> said_alive_{0};
};

}  // namespace trireme
