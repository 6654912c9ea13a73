#include <trireme/comm/all_mean.h>
#include <trireme/comm/c10d/comm_hook.h>
#include <trireme/comm/group_health.h>
#include <trireme/comm/subgroups.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <half_writable.h>
#include <latch>
#include <map>
#include <thread>
#include <thread_ranks.h>
#include <vector>

namespace trireme::c10d_communicator_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::HalfWritable;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

// What rank r holds in these tests: r + 1, times anything.
at::Tensor held(const ThreadRank& rank, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::full(sizes, rank.where.rank + 1, dtype);
}

// Collects one result per rank, to be asserted on the main thread.
template <typename T>
std::vector<T> on_ranks(int64_t world, const std::function<T(ThreadRank&)>& run) {
  std::vector<T> results(static_cast<size_t>(world));
  run_thread_ranks(
      world, [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = run(rank); });
  return results;
}

}  // namespace

TEST_CASE("all_reduce sums lists of any dtype, shape and stride in place") {
  const auto results = on_ranks<std::vector<at::Tensor>>(3, [](ThreadRank& rank) {
    std::vector<at::Tensor> tensors = {held(rank, {5}),
                                       held(rank, {2, 3}, at::kDouble),
                                       held(rank, {4}, at::kLong),
                                       held(rank, {3, 2}).t(),
                                       held(rank, {}),
                                       held(rank, {0}),
                                       held(rank, {2}, at::kComplexFloat)};
    rank.communicator->all_reduce(tensors, ReduceOp::kSum, "a list").wait();
    return tensors;
  });
  for (const auto& tensors : results) {
    for (const at::Tensor& tensor : tensors) CHECK(at::equal(tensor, at::full_like(tensor, 6)));
  }
}

TEST_CASE("all_reduce takes minimum and maximum") {
  const auto results = on_ranks<std::vector<at::Tensor>>(3, [](ThreadRank& rank) {
    std::vector<at::Tensor> smallest = {held(rank, {3})};
    std::vector<at::Tensor> largest = {held(rank, {3})};
    Pending first = rank.communicator->all_reduce(smallest, ReduceOp::kMin, "min");
    Pending second = rank.communicator->all_reduce(largest, ReduceOp::kMax, "max");
    first.wait();
    second.wait();
    return std::vector<at::Tensor>{smallest[0], largest[0]};
  });
  for (const auto& tensors : results) {
    CHECK(at::equal(tensors[0], at::full({3}, 1.0F)));
    CHECK(at::equal(tensors[1], at::full({3}, 3.0F)));
  }
}

TEST_CASE("broadcast carries bits, whatever the dtype") {
  const auto results = on_ranks<std::vector<at::Tensor>>(2, [](ThreadRank& rank) {
    std::vector<at::Tensor> tensors = {
        held(rank, {3}), held(rank, {2}, at::kLong), held(rank, {1}, at::kBool),
        held(rank, {3, 2}, at::kBFloat16).t(), held(rank, {}, at::kDouble)};
    if (rank.where.rank == 0) tensors[2].fill_(false);
    rank.communicator->broadcast(tensors, /*root=*/1, "a list").wait();
    return tensors;
  });
  for (const auto& tensors : results) {
    CHECK(tensors[2].item<bool>());
    for (const size_t i : {0U, 1U, 3U, 4U})
      CHECK(at::equal(tensors[i], at::full_like(tensors[i], 2)));
  }
}

TEST_CASE("all_gather and reduce_scatter are rank-major") {
  const auto results = on_ranks<std::vector<at::Tensor>>(2, [](ThreadRank& rank) {
    at::Tensor gathered = at::empty({2, 3});
    rank.communicator->all_gather({gathered}, {held(rank, {3})}, "rows").wait();
    at::Tensor mine = at::empty({2});
    rank.communicator
        ->reduce_scatter({mine}, {at::arange(4, at::kFloat) * (rank.where.rank + 1)},
                         ReduceOp::kSum, "quarters")
        .wait();
    return std::vector<at::Tensor>{gathered, mine};
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(
        at::equal(results[rank][0], at::tensor({1.0F, 1.0F, 1.0F, 2.0F, 2.0F, 2.0F}).view({2, 3})));
    const auto first = static_cast<float>(rank * 2);
    CHECK(at::equal(results[rank][1], at::tensor({3 * first, 3 * (first + 1)})));
  }
}

TEST_CASE("all_gather takes lists of small and large tensors of any dtype, also in place") {
  // Gloo takes another way from 64 KiB on; see [Note: pieces over Gloo].
  constexpr int64_t kLarge = 64 * 1024;
  const std::vector<at::ScalarType> dtypes = {at::kFloat,    at::kDouble, at::kHalf,
                                              at::kBFloat16, at::kLong,   at::kComplexFloat,
                                              at::kBool,     at::kByte};
  for (const int64_t world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const auto unlike = on_ranks<int64_t>(world, [&](ThreadRank& rank) {
      std::vector<at::Tensor> outputs, inputs, expected;
      for (const at::ScalarType dtype : dtypes) {
        for (const int64_t numel : {int64_t{3}, kLarge + 1}) {
          const at::Tensor all =
              (at::arange(world * numel).remainder(101)).to(dtype).view({world, numel});
          outputs.push_back(at::zeros_like(all));
          const bool in_place = outputs.size() % 3 == 0;
          if (in_place) outputs.back()[rank.where.rank].copy_(all[rank.where.rank]);
          inputs.push_back((in_place ? outputs.back() : all)[rank.where.rank]);
          expected.push_back(all);
        }
      }
      rank.communicator->all_gather(outputs, inputs, "a list").wait();
      int64_t count = 0;
      for (size_t i = 0; i < outputs.size(); ++i) count += !at::equal(outputs[i], expected[i]);
      return count;
    });
    for (const int64_t count : unlike) CHECK(count == 0);
  }
}

TEST_CASE("reduce_scatter sums, takes minimum and maximum of lists of small and large tensors") {
  const std::vector<at::ScalarType> dtypes = {at::kFloat,    at::kDouble, at::kHalf,
                                              at::kBFloat16, at::kInt,    at::kLong};
  for (const int64_t world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const auto unlike = on_ranks<int64_t>(world, [&](ThreadRank& rank) {
      int64_t count = 0;
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        std::vector<at::Tensor> outputs, inputs, expected;
        for (const at::ScalarType dtype : dtypes) {
          for (const int64_t numel : {3, 70'000}) {
            const at::Tensor base = at::arange(world * numel).remainder(9).to(dtype);
            inputs.push_back(base * (rank.where.rank + 1));
            outputs.push_back(at::empty({numel}, inputs.back().options()));
            const int64_t times = op == ReduceOp::kSum   ? world * (world + 1) / 2
                                  : op == ReduceOp::kMin ? 1
                                                         : world;
            expected.push_back(base.narrow(0, rank.where.rank * numel, numel) * times);
          }
        }
        rank.communicator->reduce_scatter(outputs, inputs, op, "a list").wait();
        for (size_t i = 0; i < outputs.size(); ++i) count += !at::equal(outputs[i], expected[i]);
      }
      return count;
    });
    for (const int64_t count : unlike) CHECK(count == 0);
  }
}

TEST_CASE("verbs of a twin do not mix with those of its communicator") {
  const auto results = on_ranks<std::vector<float>>(2, [](ThreadRank& rank) {
    const auto twin = duplicate(*rank.communicator);
    at::Tensor one = held(rank, {4});
    at::Tensor other = held(rank, {4}) * 10;
    const auto on_one = [&] { return rank.communicator->all_reduce({one}, ReduceOp::kSum, "one"); };
    const auto on_twin = [&] { return twin->all_reduce({other}, ReduceOp::kSum, "other"); };
    const bool in_order = rank.where.rank == 0;  // each rank has an order of its own
    Pending first = in_order ? on_one() : on_twin();
    Pending second = in_order ? on_twin() : on_one();
    first.wait();
    second.wait();
    const bool is_same = twin == duplicate(*rank.communicator);
    return std::vector<float>{one[0].item<float>(), other[0].item<float>(),
                              static_cast<float>(is_same)};
  });
  for (const auto& result : results) CHECK(result == std::vector<float>{3, 30, 1});
}

TEST_CASE("neighbours, and those with the same place among them, over Gloo and shared memory") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::vector<std::vector<float>> sums(4);
    std::vector<int> are_kept(4);
    run_thread_ranks(
        4,
        [&](ThreadRank& rank) {
          Communicator& all = *rank.communicator;
          const auto place = static_cast<size_t>(rank.where.rank);
          for (const auto& some : {split_contiguous(all, 2), split_strided(all, 2)}) {
            at::Tensor own = held(rank, {1});
            some->all_reduce({own}, ReduceOp::kSum, "some").wait();
            sums[place].push_back(own.item<float>());
          }
          are_kept[place] = split_contiguous(all, 2) == split_contiguous(all, 2) &&
                            split_strided(all, 2)->world() == 2;
        },
        std::chrono::seconds(20), engine);
    CHECK(are_kept == std::vector<int>(4, 1));
    CHECK(sums == std::vector<std::vector<float>>{{3, 4}, {3, 6}, {7, 4}, {7, 6}});
  }
}

TEST_CASE("all_mean leaves its argument and makes integers floats") {
  const auto results = on_ranks<std::vector<at::Tensor>>(2, [](ThreadRank& rank) {
    const at::Tensor count = held(rank, {}, at::kLong);
    return std::vector<at::Tensor>{all_mean(*rank.communicator, count), count};
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(results[rank][0].item<float>() == 1.5F);
    CHECK(results[rank][1].item<int64_t>() == static_cast<int64_t>(rank) + 1);
  }
}

TEST_CASE("a peer that leaves is named, and the group is then unusable") {
  const auto texts = on_ranks<std::vector<std::string>>(2, [](ThreadRank& rank) {
    std::vector<std::string> heard;
    if (rank.where.rank == 1) {
      rank.communicator->announce_failure("[test] rank 1 went home");
      return heard;  // the connections stay open until rank 0 has looked at the board
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        at::Tensor tensor = at::ones({4});
        rank.communicator->all_reduce({tensor}, ReduceOp::kSum, "bucket 7").wait();
      } catch (const c10::DistBackendError& error) {
        heard.emplace_back(error.what_without_backtrace());
      }
    }
    return heard;
  });
  REQUIRE(texts[0].size() == 2);
  CHECK_THAT(texts[0][0], Catch::Contains("[comm] all_reduce of bucket 7 was given up because a "
                                          "peer announced: [test] rank 1 went home"));
  CHECK_THAT(texts[0][0], Catch::Contains("(rank 0 of 2)"));
  CHECK_THAT(texts[0][1], Catch::Contains("was not started: the group failed before"));
}

TEST_CASE("a dead peer is an error that names operation and rank") {
  std::string text;
  try {
    run_thread_ranks(2, [&](ThreadRank& rank) {
      if (rank.where.rank == 1) throw std::runtime_error("rank 1 dies");
      at::Tensor tensor = at::ones({1 << 20});
      try {
        rank.communicator->all_reduce({tensor}, ReduceOp::kSum, "bucket 2: fc.weight .. fc.bias")
            .wait();
      } catch (const c10::DistBackendError& error) {
        text = error.what_without_backtrace();
      }
    });
  } catch (const std::runtime_error&) {
  }
  CHECK_THAT(text, Catch::Contains("[comm] all_reduce of bucket 2: fc.weight .. fc.bias failed:"));
  CHECK_THAT(text, Catch::Contains("rank 1 (process "));
}

TEST_CASE("a collective that is half through when the connection breaks is given up") {
  const HalfWritable half;
  std::vector<std::string> said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const at::Tensor tensor = rank.where.rank == 0 ? at::ones_like(half.tensor()) : half.tensor();
    said[static_cast<size_t>(rank.where.rank)] = error_of<c10::DistBackendError>(
        [&] { rank.communicator->broadcast({tensor}, 0, "the model").wait(); });
    rank.group.release();  // Gloo's destructor would wait for the group's timeout
  });
  CHECK_THAT(said[0], Catch::Contains("[comm] broadcast of the model failed") &&
                          Catch::Contains("the connection to rank 1 has broken") &&
                          !Catch::Contains("Timed out"));
  CHECK_THAT(said[1], Catch::Contains("the connection to rank 0 has broken") &&
                          Catch::Contains("Bad address"));
}

TEST_CASE("who has left without a word is a lost peer, and who has left in order is none") {
  for (const bool in_order : {true, false}) {
    std::string found;
    std::latch has_left(2);
    run_thread_ranks(3, [&](ThreadRank& rank) {
      const auto health = rank.communicator->health();
      if (rank.where.rank == 1) {
        if (in_order) health->board.note_started("training");  // so it leaves word of its end
        rank.communicator.reset();
        rank.group.reset();
        has_left.arrive_and_wait();
      } else if (rank.where.rank == 0) {
        has_left.arrive_and_wait();
        const auto until = std::chrono::steady_clock::now() +
                           (in_order ? std::chrono::milliseconds(1500) : std::chrono::seconds(20));
        while (found.empty() && std::chrono::steady_clock::now() < until) {
          found = health->find_lost_peer();
          std::this_thread::yield();
        }
      }
    });
    if (in_order) {
      CHECK(found.empty());
    } else {
      CHECK_THAT(found, Catch::StartsWith("the connection to rank 1 has broken"));
    }
  }
}

TEST_CASE("a rank that has ended is told apart by what it said, and by its last step") {
  const std::map<std::string, std::string> ends{
      {"", " ended normally after step 3. "},
      {"ValueError: no such file",
       "was ended after step 3 by ValueError: no such file (rank 1 of"}};
  for (const auto& [error, said] : ends) {
    const auto texts = on_ranks<std::string>(2, [&error = error](ThreadRank& rank) -> std::string {
      Communicator& communicator = *rank.communicator;
      communicator.barrier("start").wait();
      for (const bool is_done : {false, true}) communicator.show_step(3, is_done);
      if (rank.where.rank == 1) {
        communicator.health()->board.leave(error);
        rank.communicator.reset();
        rank.group.reset();  // rank 0 notices it
        return {};
      }
      at::Tensor tensor = at::ones({1 << 20});
      try {
        communicator.all_reduce({tensor}, ReduceOp::kSum, "bucket 2").wait();
      } catch (const c10::DistBackendError& caught) {
        return caught.what_without_backtrace();
      }
      return "no error";
    });
    CHECK_THAT(texts[0], Catch::Contains(said));
    const bool is_normal = error.empty();
    CHECK((texts[0].find("See join()") != std::string::npos) == is_normal);
  }
}

TEST_CASE("a list may be used again after its Pending was waited for") {
  const auto results = on_ranks<at::Tensor>(2, [](ThreadRank& rank) {
    at::Tensor tensor = held(rank, {4});
    for (int i = 0; i < 3; ++i)
      rank.communicator->all_reduce({tensor}, ReduceOp::kSum, "again").wait();
    return tensor;
  });
  for (const at::Tensor& tensor : results) CHECK(at::equal(tensor, at::full({4}, 12.0F)));
}

}  // namespace trireme::c10d_communicator_test
