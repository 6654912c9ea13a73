#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// [Note: messages of a connection that has broken]
//
// When a connection breaks, Gloo ends the messages that have not begun. One that is half sent or
// half received it forgets, in a collective, too: the wait for it lasts as long as the group's
// timeout says. So a wait that takes long posts a receive from its peer, once, which no message
// ever answers: that one ends when the connection breaks. It is looked at without a wait: Gloo's
// wait, if it was aborted before it began, throws the error of a receive that has ended by one, and
// returns at once otherwise.

// What Gloo says of the connections of one group to its other ranks. Thread-safe.
class ConnectionWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // Posts a receive of a byte from a rank, by a tag by which nobody sends. Returns null if the
  // group is gone, or takes no such receive: then nothing is known.
  using Post = std::function<c10::intrusive_ptr<c10d::Work>(int64_t rank)>;

  explicit ConnectionWatch(Post post) : post_(std::move(post)) {}

  // Returns what Gloo says of the connection to `rank`, if it broke `patience` ago or before; ""
  // otherwise. The first call for a rank posts the receive.
  std::string why_broken(int64_t rank, Clock::duration patience = {});
  // Takes the receives back, which keep Gloo's connections.
  void forget();

 private:
  struct Connection {
    c10::intrusive_ptr<c10d::Work> receive;
    std::string why_broken;
    Clock::time_point broken_at;
  };

  Post post_;
  std::mutex mutex_;
  std::map<int64_t, Connection> connections_;  // [rank]
};

// Returns whether a message is through whose wait was ended: that can happen at the same moment.
// Gloo closes all connections of the group if it is not.
bool is_through(c10d::Work& message);

// Makes a tag by which nobody sends, added to one by which messages come. Torch picks one of
// several connections by the remainder of a tag: with up to 16 of them both have the same one.
inline constexpr int kUnansweredTagOffset = 720'720;

}  // namespace trireme
