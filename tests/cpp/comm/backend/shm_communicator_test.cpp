// What follows a failure where all ranks share the memory of a host: the group works again.

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <chrono>
#include <string>
#include <thread>
#include <thread_ranks.h>
#include <utility>
#include <vector>

namespace trireme::shm_communicator_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

std::string said_by(Pending pending) {
  try {
    pending.wait();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace

TEST_CASE("what is submitted before a failure was noticed ends with it") {
  std::vector<std::string> said(2);
  std::vector<float> sums(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Communicator& group = *rank.communicator;
        const auto sum = [&](const char* label) {
          return group.all_reduce({at::ones({4})}, ReduceOp::kSum, label);
        };
        if (rank.where.rank == 1) {
          group.announce_failure("[test] rank 1 stumbled");
        } else {
          Pending first = sum("bucket 0");
          while (!first.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          Pending second = sum("bucket 1");  // not the first one of what follows
          said = {said_by(std::move(second)), said_by(std::move(first))};
        }
        group.recover();
        const at::Tensor ones = at::ones({1});
        group.all_reduce({ones}, ReduceOp::kSum, "the next step").wait();
        sums[static_cast<size_t>(rank.where.rank)] = ones.item<float>();
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& text : said)
    CHECK_THAT(text, Catch::Contains("has left it: [test] rank 1 stumbled"));
  CHECK(sums == std::vector<float>{2, 2});
}

}  // namespace trireme::shm_communicator_test
