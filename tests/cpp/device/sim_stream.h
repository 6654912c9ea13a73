#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>

namespace trireme::test {

// [Note: a device of threads]
//
// Machines with GPUs are rare, and where code for them is wrong it is so by order: an operator that
// reads what another stream still writes, memory that went while somebody needed it. So these tests
// bring a device that makes such mistakes visible anywhere, "sim" (torch's PrivateUse1), of which
// rank r has number r:
//
//   streams     are threads. What is enqueued happens later, kLag after its turn has come, and in
//               order with other streams only if an event says so
//   operators   torch's of the CPU: they wait for their own stream, read, compute, and enqueue what
//               they write. So whoever reads it from another stream without an event is too early
//   memory      may not be touched by the host: tensors point to pages without access. It is full
//               of NaN at first and, at once in the order of the stream that allocated it, when it
//               is freed, as by CUDA's caching allocator
//   copies      from and to pinned memory are enqueued; others wait, as on CUDA
//   engine      SimEngine, a c10d backend that keeps to NCCL's ways with streams
//
// What it does not show: that a stream writes too early what another one is still to read by an
// operator (a copy or collective that reads too late is seen), CUDA's kernels, NCCL itself.

constexpr std::chrono::microseconds kLag{200};
constexpr c10::DeviceIndex kSimDevices = 8;

class SimStream {
 public:
  using Task = std::function<void()>;
  using Ticket = uint64_t;

  // Starts the thread with the first task. Tasks must not throw.
  Ticket enqueue(Task task, std::chrono::microseconds lag = kLag);
  // Returns the ticket of what was enqueued last; 0 if nothing was.
  Ticket last() const;
  bool is_done(Ticket ticket) const;
  void wait(Ticket ticket) const;

 private:
  struct Item {
    Task task;
    std::chrono::microseconds lag;
  };
  void work();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Item> queue_;
  Ticket enqueued_ = 0;
  Ticket done_ = 0;
  bool has_thread_ = false;
};

// A place in a stream.
struct SimEvent {
  SimStream* stream = nullptr;
  SimStream::Ticket ticket = 0;
};

// What the stream is given waits until release().
class HeldStream {
 public:
  explicit HeldStream(SimStream& stream) {
    stream.enqueue([released = released_.get_future().share()] { released.wait(); });
  }
  void release() { released_.set_value(); }

 private:
  std::promise<void> released_;
};

SimStream& sim_stream(const c10::Stream& stream);
SimEvent event_of(SimStream& stream);
// What `stream` is given from now on happens after the event.
void block(SimStream& stream, const SimEvent& event);

c10::Stream current_sim_stream(c10::Device device);
// Until all that any stream of the device was given is done.
void synchronize(c10::Device device);

}  // namespace trireme::test
