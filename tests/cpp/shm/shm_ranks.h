#pragma once

#include <trireme/shm/collectives.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace trireme::shm::test {

// What a Store is to a real group.
class MemoryExchange final : public Exchange {
 public:
  void put(const std::string& key, const std::string& text) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_[key] = text;
    came_.notify_all();
  }
  std::string get(const std::string& key) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = [&] { return texts_.count(key) > 0; };
    if (!came_.wait_for(lock, std::chrono::seconds(20), found))
      throw std::runtime_error("nobody put " + key);
    return texts_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::string, std::string> texts_;
};

// Returns when that is so, and not before.
inline void until(const std::function<bool()>& is_so) {
  while (!is_so()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

struct ShmRank {
  int64_t rank;
  HostGroup& group;
  Collectives& collectives;
};

struct ShmRun {
  int64_t world = 2;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  std::vector<std::string> partitions{};  // rank by rank
};

// Runs `rank_main` on threads that are the ranks of one host group. Rethrows the first exception.
// Catch's assertions belong to one thread: collect in the ranks, assert after the call.
inline void run_shm_ranks(const ShmRun& run, const std::function<void(ShmRank&)>& rank_main) {
  MemoryExchange exchange;
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < run.world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        HostGroupRequest request{{rank, run.world}, run.timeout};
        if (!run.partitions.empty()) request.partition = run.partitions[static_cast<size_t>(rank)];
        const auto group = HostGroup::join(exchange, request);
        Collectives collectives(*group);
        ShmRank self{rank, *group, collectives};
        rank_main(self);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

// Until a thread of that rank sleeps in a wait for another one, or for a message.
inline void until_asleep(HostGroup& group, int64_t rank) {
  until([&] {
    return group.block(rank).futex.sleepers > 0 || group.block(rank).mail_futex.sleepers > 0;
  });
}

template <typename T>
Pieces pieces_of(std::vector<T>& values) {
  return {reinterpret_cast<std::byte*>(values.data()),
          static_cast<int64_t>(values.size() * sizeof(T))};
}

}  // namespace trireme::shm::test
