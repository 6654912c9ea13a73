#pragma once

#include <trireme/strategies/remote/endpoint.h>

#include <functional>
#include <string>
#include <thread_ranks.h>

namespace trireme::test {

// Runs `rank_main` on ranks "p0", "p1", ... with an endpoint each, which is stopped after it.
inline void run_endpoints(int64_t world,
                          const std::function<void(remote::Endpoint&, int64_t rank)>& rank_main,
                          Engine engine = Engine::kShm, int64_t threads = 2) {
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        remote::Endpoint endpoint(rank.communicator, "p" + std::to_string(rank.where.rank),
                                  {.threads = threads});
        rank_main(endpoint, rank.where.rank);
        endpoint.stop();
      },
      std::chrono::seconds(30), engine);
}

}  // namespace trireme::test
