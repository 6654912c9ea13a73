#pragma once

#include <trireme/comm/tensor_channel.h>
#include <trireme/comm/threads/thread_group.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// The messages on their way from one thread to another.
struct ThreadQueue {
  ChannelRequest request;
  std::deque<TensorMessage> messages = {};
  std::atomic<int64_t> waiting{0};  // counts messages; read without the lock

  explicit ThreadQueue(ChannelRequest asked) : request(std::move(asked)) {}
};

// The state that the threads of a group share.
class ThreadGroup::State {
 public:
  State(int64_t ranks, std::vector<c10::Device> devices);

  int64_t ranks() const { return ranks_; }
  c10::Device device(int64_t rank) const { return devices_[static_cast<size_t>(rank)]; }

  // One thread's part in a collective.
  struct Deposit {
    std::string operation = {};  // all threads bring the same one
    std::vector<at::Tensor> outputs = {};
    std::vector<at::Tensor> inputs = {};
  };
  // Waits for all threads; the last one calls `run` with the deposits of all, in the order of
  // ranks, and throws what `run` throws. The others then throw DistBackendError with its text, and
  // all do if a thread has failed or brings another operation.
  using Run = std::function<void(std::vector<Deposit>& all)>;
  void meet(int64_t rank, Deposit deposit, const Run& run);

  void announce_failure(int64_t rank, const std::string& reason);
  void recover();

  // Returns the queues of the channels that a thread asks for with its next call: the same ones
  // that the others get with theirs. Throws ValueError if they ask for others.
  using Queues = std::vector<std::unique_ptr<ThreadQueue>>;
  std::shared_ptr<Queues> queues(int64_t rank, const std::vector<ChannelRequest>& requests);

  // Throw DistBackendError if a thread has failed, even if a message is there: a thread that is no
  // longer needed ends soon.
  void push(ThreadQueue& queue, TensorMessage message);
  TensorMessage take_message(ThreadQueue& queue, const std::string& label);
  void forget_before(ThreadQueue& queue, int64_t step);

 private:
  // Guarded by the lock, like all below but `devices_`, `has_failed_` and the queues' `waiting`.
  struct RankState {
    std::condition_variable wake = {};
    size_t channels_asked = 0;
  };

  void wake_all();
  void expect_no_failure(const std::string& what, int64_t rank) const;
  [[noreturn]] void throw_failure(const std::string& what, int64_t rank) const;

  int64_t ranks_;
  std::vector<c10::Device> devices_;  // never changed
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<RankState>> rank_states_;
  std::optional<std::string> failure_;
  std::atomic<bool> has_failed_{false};
  std::vector<Deposit> deposits_;
  int64_t arrived_ = 0;
  uint64_t meeting_ = 0;  // counts meetings that are over
  std::string refusal_;   // the error of the last thread in the meeting that is over
  std::vector<std::shared_ptr<Queues>> made_;
};

}  // namespace trireme
