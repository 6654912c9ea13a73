#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/error.h>
#include <trireme/common/forks.h>
#include <trireme/memory/snapshot.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace trireme {

// A save and the thread that does it.
struct SaveInFlight {
  std::string path;
  RankOf where;
  const Communicator* group = nullptr;  // of the caller; only compared
  std::thread::id caller;
  uint64_t born = forks_so_far();
  double call_ms = 0;
  std::shared_ptr<Snapshot> snapshot = nullptr;
  std::atomic<bool> is_given_up{false};
  std::thread thread;

  std::mutex mutex;  // guards all below
  std::condition_variable ended;
  std::shared_ptr<Communicator> saver = nullptr;  // until the end
  bool is_done = false;
  bool is_fetched = false;  // the error
  std::exception_ptr error = nullptr;
  int64_t written_bytes = 0;

  void end(std::exception_ptr with, int64_t written) {
    const std::lock_guard<std::mutex> lock(mutex);
    saver.reset();
    error = std::move(with);
    written_bytes = written;
    is_done = true;
    ended.notify_all();
  }
};

}  // namespace trireme
