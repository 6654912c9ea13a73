// Messages between two ranks, over Gloo and over shared memory.

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <half_writable.h>
#include <latch>
#include <recording_communicator.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::messages_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::HalfWritable;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::WireRecord;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);

std::vector<at::Tensor> shapes() {
  return {at::empty({7}),
          at::empty({2, 3}, at::kDouble),
          at::empty({0, 4}),
          at::empty({}, at::kLong),
          at::empty({5}, at::kBFloat16),
          at::empty({3}, at::kBool),
          at::empty({4}, at::kComplexFloat),
          at::empty({4, 6}).t(),
          at::_neg_view(at::empty({6})),
          at::empty({3}, at::kComplexFloat).conj(),
          at::empty({300'000})};
}

std::vector<at::Tensor> filled(double value) {
  std::vector<at::Tensor> tensors = shapes();
  for (const at::Tensor& tensor : tensors) tensor.fill_(value);
  return tensors;
}

}  // namespace

TEST_CASE("tensors of any dtype, shape and stride go round a ring") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    constexpr int64_t kWorld = 3;
    std::vector<int64_t> wrong(kWorld);
    run_thread_ranks(
        kWorld,
        [&](ThreadRank& rank) {
          const int64_t own = rank.where.rank;
          const int64_t before = (own + kWorld - 1) % kWorld;
          const std::vector<at::Tensor> received = filled(9);
          Pending recv = rank.communicator->recv(received, before, "a ring");
          Pending send = rank.communicator->send(filled(double(own)), (own + 1) % kWorld, "a ring");
          recv.wait();
          send.wait();
          for (const at::Tensor& tensor : received)
            wrong[static_cast<size_t>(own)] +=
                !at::equal(tensor, at::full_like(tensor, double(before)));
          wrong[static_cast<size_t>(own)] += !recv.done() || !send.done();
        },
        kTimeout, engine);
    CHECK(wrong == std::vector<int64_t>(kWorld));
  }
}

// Torch's lazy minus is a bit of the tensor: its memory holds the values with the other sign.
TEST_CASE("collectives read and write tensors with a lazy minus as they are") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::vector<int64_t> wrong(2);
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          Communicator& ranks = *rank.communicator;
          const auto minus = [](double value) { return at::_neg_view(at::full({4}, -value)); };
          const at::Tensor sum = minus(2);
          ranks.all_reduce({sum}, ReduceOp::kSum, "a sum").wait();
          const at::Tensor told = minus(rank.where.rank == 0 ? 3 : 0);
          ranks.broadcast({told}, 0, "a number").wait();
          const at::Tensor all = at::empty({8});
          ranks.all_gather({all}, {minus(5)}, "numbers").wait();
          const at::Tensor part = at::empty({2});
          ranks.reduce_scatter({part}, {minus(7)}, ReduceOp::kSum, "parts").wait();
          wrong[static_cast<size_t>(rank.where.rank)] =
              !(sum == 4).all().item<bool>() + 2 * !(told == 3).all().item<bool>() +
              4 * !(all == 5).all().item<bool>() + 8 * !(part == 14).all().item<bool>();
        },
        kTimeout, engine);
    CHECK(wrong == std::vector<int64_t>(2));
  }
}

TEST_CASE("messages come in the order in which they were sent, beside collectives") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::vector<double> came;
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          Communicator& ranks = *rank.communicator;
          std::vector<Pending> pending;
          std::vector<at::Tensor> values;
          for (int64_t i = 0; i < 20; ++i) {
            values.push_back(at::full({1}, rank.where.rank == 0 ? double(i) : -1));
            pending.push_back(rank.where.rank == 0 ? ranks.send({values.back()}, 1, "a number")
                                                   : ranks.recv({values.back()}, 0, "a number"));
            if (i == 10) ranks.barrier("in the middle").wait();
          }
          for (Pending& message : pending) message.wait();
          if (rank.where.rank == 0) return;
          for (const at::Tensor& value : values) came.push_back(value.item<double>());
        },
        kTimeout, engine);
    std::vector<double> expected(20);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<double>(i);
    CHECK(came == expected);
  }
}

TEST_CASE("who waits for a message hears at once why none will come") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::string said;
    std::string later;
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          rank.communicator->barrier("connected").wait();
          if (rank.where.rank == 1) {
            rank.communicator->announce_failure("rank 1 spilled the coffee");
            return;
          }
          try {
            rank.communicator->recv({at::empty({3})}, 1, "activations of stage 1").wait();
          } catch (const c10::DistBackendError& error) {
            said = error.what();
          }
          if (const auto failure = rank.communicator->failure()) later = *failure;
        },
        kTimeout, engine);
    CHECK_THAT(said, Catch::Contains("recv of activations of stage 1 from rank 1") &&
                         Catch::Contains("rank 1 spilled the coffee"));
    CHECK_THAT(said, !Catch::Contains("Timed out"));
    if (engine == Engine::kGloo) CHECK_THAT(later, Catch::Contains("spilled the coffee"));
  }
}

TEST_CASE("over Gloo a message that is half through when the connection breaks is given up") {
  const HalfWritable half;
  std::vector<std::string> said(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Communicator& ranks = *rank.communicator;
        said[static_cast<size_t>(rank.where.rank)] = error_of<c10::DistBackendError>([&] {
          if (rank.where.rank == 0) {
            ranks.send({at::ones_like(half.tensor())}, 1, "activations").wait();
          } else {
            ranks.recv({half.tensor()}, 0, "activations").wait();
          }
        });
      },
      kTimeout);
  CHECK_THAT(said[0], Catch::Contains("send of activations to rank 1 failed") &&
                          !Catch::Contains("Timed out"));
  CHECK_THAT(said[1], Catch::Contains("recv of activations from rank 0 failed") &&
                          Catch::Contains("Bad address"));
}

TEST_CASE("a wait for a message may end before the message comes, and be taken up again") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::latch is_late(2);
    std::vector<bool> has_come;
    at::Tensor came = at::zeros({3});
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          if (rank.where.rank == 0) {
            is_late.arrive_and_wait();
            rank.communicator->send({at::full({3}, 7.0)}, 1, "a number").wait();
            return;
          }
          Pending recv = rank.communicator->recv({came}, 0, "a number");
          for (int i = 0; i < 2; ++i)
            has_come.push_back(recv.wait_for(std::chrono::milliseconds(5)));
          is_late.arrive_and_wait();
          has_come.push_back(recv.wait_for(kTimeout));
        },
        kTimeout, engine);
    CHECK(has_come == std::vector<bool>{false, false, true});
    CHECK(at::equal(came, at::full({3}, 7.0)));
  }
}

TEST_CASE("a rank that is not another one of the group is refused") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::vector<std::string> said;
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          if (rank.where.rank == 1) return;
          for (const int64_t peer : {0, 2, -1}) {
            try {
              rank.communicator->send({at::empty({3})}, peer, "a gradient");
            } catch (const c10::ValueError& error) {
              said.push_back(error.what_without_backtrace());
            }
          }
        },
        kTimeout, engine);
    REQUIRE(said.size() == 3);
    CHECK_THAT(said[0], Catch::Contains("[comm] got a send of a gradient to rank 0, expected "
                                        "another rank of the group (rank 0 of 2)"));
  }
}

TEST_CASE("a recorded group notes messages") {
  RecordingCommunicator ranks(RankOf{0, 2});
  ranks.send({at::empty({3}), at::empty({2}, at::kHalf)}, 1, "activations").wait();
  ranks.recv({at::empty({3})}, 1, "gradients").wait();
  const std::vector<WireRecord>& records = ranks.records();
  REQUIRE(records.size() == 2);
  CHECK(records[0].verb == "send");
  CHECK(records[0].label == "send of activations to rank 1");
  CHECK(records[0].bytes == 16);
  CHECK(records[1].label == "recv of gradients from rank 1");
  CHECK_THROWS_AS(ranks.recv({}, 0, "nothing"), c10::ValueError);
}

}  // namespace trireme::messages_test
