#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/error.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>

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
void run_thread_ranks(int64_t world, const std::function<void(ThreadRank&)>& rank_main,
                      std::chrono::milliseconds timeout = std::chrono::seconds(30),
                      Engine engine = Engine::kGloo);

}  // namespace trireme::test
