#pragma once

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/launch/make_communicator.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trireme::test {

// One rank of a run inside this process.
struct ThreadRank {
  RankOf where;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<Communicator> communicator;
};

enum class Engine { kGloo, kShm };

// Runs `rank_main` on `world` threads that are the ranks of one group, by default Gloo's over
// loopback, and one shared HashStore, and rethrows the first exception any of them threw. A rank
// that throws loses its connections at once, so that its peers fail instead of waiting; otherwise
// the groups live until all ranks have returned. Then they end at the same time: Gloo's destructor
// waits for what is in flight, which the end of a peer's connections ends.
//
// Catch's assertions belong to one thread: collect in the ranks, assert after the call.
inline void run_thread_ranks(int64_t world, const std::function<void(ThreadRank&)>& rank_main,
                             std::chrono::milliseconds timeout = std::chrono::seconds(30),
                             Engine engine = Engine::kGloo) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<ThreadRank> ranks(static_cast<size_t>(world));
  std::mutex mutex;
  std::exception_ptr first_error;
  std::latch all_connected(world);
  std::latch all_returned(world);

  auto connect = [&](ThreadRank& rank) {
    // A rank that throws at once must not take its connections away while others still make theirs.
    struct Arrival {
      std::latch& all;
      ~Arrival() { all.arrive_and_wait(); }
    };
    const Arrival arrival{all_connected};
    if (engine == Engine::kShm) {
      rank.group = make_shm_group(store, rank.where, {.timeout = timeout});
    } else {
      rank.group = make_gloo_group(
          store, rank.where,
          {.timeout = timeout, .connect_timeout = timeout, .hostname = "127.0.0.1"});
    }
  };

  auto run_rank = [&](ThreadRank& rank) {
    try {
      at::set_num_threads(1);
      rank.store = store;
      connect(rank);
      rank.communicator = make_communicator(rank.group, store);
      rank_main(rank);
    } catch (...) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
      rank.communicator.reset();  // only now, or the error of a peer might be the first one
      rank.group.reset();
    }
    all_returned.arrive_and_wait();
    rank.communicator.reset();
    rank.group.reset();
  };

  std::vector<std::thread> threads;
  for (int64_t r = 0; r < world; ++r) {
    ThreadRank& rank = ranks[static_cast<size_t>(r)];
    rank.where = {r, world};
    threads.emplace_back([&run_rank, &rank] { run_rank(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace trireme::test
