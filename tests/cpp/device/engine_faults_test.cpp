// Ranks whose devices wait in vain hear why, while the CPU goes on.

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <thread>
#include <vector>

namespace trireme::engine_faults_test {

using namespace trireme::test;

TEST_CASE("what a peer announced is raised by a rank that only enqueues") {
  std::string said;
  run_sim_ranks(2, [&](ThreadRank& rank) {
    const at::Tensor sums = at::ones({2}, sim_device(rank.where.rank));
    const auto sum = [&] {
      rank.communicator->all_reduce({sums}, ReduceOp::kSum, "the sums").wait();
    };
    sum();  // nothing is announced yet
    if (rank.where.rank == 0) {
      rank.store->set("looked", "yes");
      rank.store->wait({"announced"});
      int64_t enqueued = 0;  // who raises has enqueued
      for (; said.empty(); ++enqueued) {
        try {
          sum();
        } catch (const c10::DistBackendError& error) {
          said = error.what_without_backtrace();
        }
        // It looks again a second after it has looked; so rank 1 has not too many to catch up with.
        if (said.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      rank.store->set("enqueued", std::to_string(enqueued));
    } else {
      rank.store->wait({"looked"});
      rank.communicator->announce_failure("[test] dropped the ball");
      rank.store->set("announced", "yes");
      const int64_t enqueued = std::stoll(rank.store->get_to_str("enqueued"));
      for (int64_t i = 0; i < enqueued; ++i) {
        std::vector<at::Tensor> tensors{sums};
        rank.group->allreduce(tensors)->wait();
      }
    }
  });
  CHECK_THAT(said, Catch::Contains("[comm] all_reduce of the sums was given up because a peer "
                                   "announced: [test] dropped the ball"));
}

}  // namespace trireme::engine_faults_test
