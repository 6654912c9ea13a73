#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/launch/make_communicator.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <latch>
#include <mutex>
#include <thread>
#include <vector>

#include "thread_ranks.h"

namespace trireme::test {

void run_thread_ranks(int64_t world, const std::function<void(ThreadRank&)>& rank_main,
                      std::chrono::milliseconds timeout, Engine engine) {
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
