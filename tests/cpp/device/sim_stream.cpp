#include <device/sim_stream.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <device/sim_device.h>
#include <thread>
#include <utility>

namespace trireme::test {

SimStream::Ticket SimStream::enqueue(Task task, std::chrono::microseconds lag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back({std::move(task), lag});
  // Streams live as long as the process, and so may their threads.
  if (!std::exchange(has_thread_, true)) std::thread([this] { work(); }).detach();
  changed_.notify_all();
  return ++enqueued_;
}

SimStream::Ticket SimStream::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

bool SimStream::is_done(Ticket ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

void SimStream::wait(Ticket ticket) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
}

void SimStream::work() {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  for (;;) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    if (item.lag.count() > 0) std::this_thread::sleep_for(item.lag);
    item.task();
    item.task = nullptr;  // what it holds goes before it counts as done
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

SimStream& sim_stream(const c10::Stream& stream) {
  // Never destroyed: their threads may outlive main().
  static auto& streams = *new std::array<std::array<SimStream, kSimStreams>, kSimDevices>();
  return streams.at(static_cast<size_t>(stream.device_index()))
      .at(static_cast<size_t>(stream.id()));
}

SimEvent event_of(SimStream& stream) { return {&stream, stream.last()}; }

void block(SimStream& stream, const SimEvent& event) {
  if (event.stream == nullptr || event.stream == &stream) return;
  stream.enqueue([event] { event.stream->wait(event.ticket); }, std::chrono::microseconds(0));
}

c10::Stream current_sim_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(kSim).getStream(device);
}

void synchronize(c10::Device device) {
  for (c10::StreamId id = 0; id < kSimStreams; ++id) {
    SimStream& stream = sim_stream(c10::Stream(c10::Stream::UNSAFE, device, id));
    stream.wait(stream.last());
  }
}

}  // namespace trireme::test
