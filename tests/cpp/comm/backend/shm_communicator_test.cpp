// Failures where all ranks share the memory of a host, and what is none: the group works on.

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/common/interruption.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <catch_torch.h>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
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

template <typename Waited>
std::string said_by(Waited&& waited) {
  try {
    waited.wait();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// What a thread does when it looks around in a wait.
thread_local std::function<void()> look_of_this_thread;

void look_around() {
  if (look_of_this_thread) look_of_this_thread();
}

}  // namespace

TEST_CASE("ranks that do not come to make a group are named") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error_of = [&](int64_t rank) -> std::string {
    try {
      make_shm_backend(store, {rank, 3}, {.connect_timeout = std::chrono::milliseconds(20)});
    } catch (const c10::DistBackendError& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  const std::string within = " did not come to make the group within 20 ms (rank ";
  CHECK_THAT(error_of(2), Catch::Contains("[shm_backend] rank 0, rank 1" + within + "2 of 3)"));
  CHECK_THAT(error_of(0), Catch::Contains("[shm_backend] rank 1" + within + "0 of 3)"));
}

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

TEST_CASE("a callback of what a failure ends may wait for what ends with it") {
  std::promise<std::string> said;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        if (rank.where.rank == 1) return;
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        for (int i = 0; i < 3; ++i) {
          std::vector<at::Tensor> tensors{at::ones({4})};
          c10d::AllreduceOptions options;
          options.asyncOp = true;
          works.push_back(rank.group->allreduce(tensors, options));
        }
        // The first one may have begun, and waits for rank 1; the others end at once, together.
        works[1]->getFuture()->addCallback(
            [&said, last = works[2]](c10::ivalue::Future&) { said.set_value(said_by(*last)); },
            /*uses_future=*/false);
        rank.communicator->announce_failure("[test] rank 0 stumbled");
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK_THAT(said.get_future().get(), Catch::Contains("[test] rank 0 stumbled"));
}

TEST_CASE("a message that comes just as a look at its sender is due has come") {
  std::string said;
  float received = 0;
  std::shared_ptr<Communicator> sender;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        if (rank.where.rank == 1) sender = rank.communicator;
        rank.communicator->barrier("the beginning").wait();
        if (rank.where.rank == 1) return rank.communicator->barrier("the end").wait();
        int looks = 0;
        set_interruption_check(&look_around);
        look_of_this_thread = [&] {
          // The first look lasts longer than the slice. The second one comes at its end, when
          // nothing more is read before the slice is given up.
          if (++looks == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
          if (looks == 2) sender->send({at::full({1}, 7.0F)}, 0, "late").wait();
        };
        const at::Tensor got = at::zeros({1});
        said = said_by(rank.communicator->recv({got}, 1, "late"));
        look_of_this_thread = {};
        received = got.item<float>();
        sender.reset();
        rank.communicator->barrier("the end").wait();
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(said == "no error");
  CHECK(received == 7);
}

}  // namespace trireme::shm_communicator_test
