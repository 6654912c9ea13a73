// Ranks whose devices wait in vain hear why, while the CPU goes on.

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <thread>

namespace trireme::engine_faults_test {

using namespace trireme::test;

TEST_CASE("what a peer announced is raised by a rank that only enqueues") {
  std::string said;
  run_sim_ranks(2, [&](ThreadRank& rank) {
    const at::Tensor sums = at::ones({2}, sim_device(rank.where.rank));
    const auto enqueue = [&] {
      std::vector<at::Tensor> tensors{sums};
      rank.group->allreduce(tensors)->wait();
    };
    if (rank.where.rank == 1) rank.communicator->announce_failure("[test] dropped the ball");
    for (int64_t i = 0; i < 60; ++i) {  // 3 s; who raises has enqueued
      if (rank.where.rank == 1 || !said.empty()) {
        enqueue();
      } else {
        try {
          rank.communicator->all_reduce({sums}, ReduceOp::kSum, "the sums").wait();
        } catch (const c10::DistBackendError& error) {
          said = error.what_without_backtrace();
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  CHECK_THAT(said, Catch::Contains("[comm] all_reduce of the sums was given up because a peer "
                                   "announced: [test] dropped the ball"));
}

}  // namespace trireme::engine_faults_test
