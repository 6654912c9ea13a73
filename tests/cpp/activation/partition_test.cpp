// Inputs of checkpoints that ranks have in common, kept once.

#include <trireme/activation/partition.h>

#include <trireme/activation/checkpoint.h>
#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/common/interruption.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <thread_ranks.h>
#include <vector>

#include "catch_torch.h"

namespace trireme::partition_test {

using test::Engine;
using test::error_of;
using test::run_thread_ranks;
using test::ThreadRank;
using torch::Tensor;

namespace {

constexpr int64_t kBytes = 64 * 64 * 4;  // an input has so many
constexpr auto kTimeout = std::chrono::seconds(30);

// Three blocks; the same values in every call.
struct Net {
  Net() {
    for (int i = 0; i < 3; ++i)
      weights.push_back((torch::arange(64 * 64).view({64, 64}) * 0.37 + i).sin().div(4));
    for (Tensor& weight : weights) weight.requires_grad_();
  }

  Tensor forward(Tensor x, const CheckpointOptions* options) const {
    for (const Tensor& weight : weights) {
      const auto block = [weight](const Tensor& value) { return value.mm(weight).tanh(); };
      x = options != nullptr ? checkpoint(*options, block, x) : block(x);
    }
    return x.square().sum();
  }

  std::vector<Tensor> backward(const Tensor& loss) {
    for (Tensor& weight : weights) weight.mutable_grad() = Tensor();
    loss.backward();
    std::vector<Tensor> found{loss.detach()};
    for (const Tensor& weight : weights) found.push_back(weight.grad());
    return found;
  }

  std::vector<Tensor> weights;
};

Tensor input(double shift = 0) { return (torch::arange(64 * 64).view({64, 64}) + shift).cos(); }

bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return torch::equal(x, y); });
}

std::vector<Tensor> plain(double shift = 0) {
  Net net;
  return net.backward(net.forward(input(shift), nullptr));
}

CheckpointOptions partitioned(ThreadRank& rank) {
  CheckpointOptions options;
  options.name = "Block";
  options.partition = make_partition_packer(rank.communicator);
  return options;
}

PartitionMemory memory_of(const CheckpointOptions& options) {
  return static_cast<PartitionPacker&>(*options.partition).memory();
}

// What every rank says.
template <typename Result>
std::vector<Result> on_ranks(int64_t world, Engine engine,
                             const std::function<Result(ThreadRank&)>& rank_main) {
  std::vector<Result> results(static_cast<size_t>(world));
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = rank_main(rank); },
      kTimeout, engine);
  return results;
}

}  // namespace

TEST_CASE("bits are those of a plain call, and ranks keep inputs once") {
  const std::vector<Tensor> expected = plain();
  struct Result {
    bool is_equal = true;
    std::vector<PartitionMemory> memory = {};
  };
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto results = on_ranks<Result>(3, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      Result result;
      for (int step = 0; step < 3; ++step) {
        Net net;
        Tensor loss = net.forward(input(), &options);
        result.memory.push_back(memory_of(options));
        result.is_equal &= equal(net.backward(loss), expected);
        result.memory.push_back(memory_of(options));
      }
      return result;
    });
    for (const Result& result : results) {
      CHECK(result.is_equal);
      const PartitionMemory& full = result.memory[0];
      CHECK(full.inputs == 3 * kBytes);
      CHECK(full.shared == (engine == Engine::kShm ? 3 * kBytes : 0));
      CHECK(full.slices == (engine == Engine::kShm ? 0 : 3 * ((64 * 64 + 2) / 3) * 4));
      for (size_t i = 0; i < result.memory.size(); ++i) {
        CHECK(result.memory[i].inputs == (i % 2 == 0 ? 3 * kBytes : 0));
        CHECK(result.memory[i].host == full.host);  // blocks are taken again
      }
      CHECK((full.host > 0) == (engine == Engine::kShm));
    }
  }
}

TEST_CASE("ranks whose inputs differ all raise, and go on") {
  const std::vector<Tensor> expected = plain();
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto said = on_ranks<std::string>(3, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      const double shift = rank.where.rank == 2 ? 1 : 0;
      std::string text = error_of([&] { Net().forward(input(shift), &options); });
      Net net;
      if (!equal(net.backward(net.forward(input(), &options)), expected)) text += " (other bits)";
      return text;
    });
    for (size_t rank = 0; rank < 3; ++rank) {
      CHECK_THAT(said[rank],
                 Catch::StartsWith("[checkpoint] input 0 of Block (Float[64, 64]) differs between "
                                   "ranks of partition=: rank 2 has other values than rank 0 "
                                   "(rank " +
                                   std::to_string(rank) + " of 3). Pass tensors"));
      CHECK_THAT(said[rank], Catch::EndsWith("nothing to partition."));
    }
  }
}

TEST_CASE("the error names the input and the rank that differ") {
  const auto sum = [](const Tensor& a, const Tensor& b, const Tensor& c) { return a + b + c; };
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto said = on_ranks<std::string>(3, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      Tensor second = input();
      if (rank.where.rank == 1) second.mutable_data_ptr<float>()[64 * 64 - 1] += 1;
      return error_of([&] { checkpoint(options, sum, input(1), second, input(2)); });
    });
    for (const std::string& text : said) {
      CHECK_THAT(text, Catch::StartsWith("[checkpoint] input 1 of Block (Float[64, 64]) differs "
                                         "between ranks of partition=: rank 1 has other values "
                                         "than rank 0 (rank "));
    }
  }
}

TEST_CASE("ranks that do different things all raise, and go on") {
  const auto pass = [](const Tensor& value) { return value * 2; };
  const auto both = [](const Tensor& value, const Tensor&) { return value * 2; };
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto said = on_ranks<std::string>(2, engine, [&](ThreadRank& rank) {
      CheckpointOptions options = partitioned(rank);
      const bool is_first = rank.where.rank == 0;
      const Tensor x = input() * torch::ones({}).requires_grad_();
      std::string text;
      text += error_of([&] { checkpoint(options, pass, is_first ? x : x.narrow(0, 0, 32)); });
      text += error_of([&] { checkpoint(options, pass, is_first ? x : x.to(torch::kDouble)); });
      text += error_of([&] { checkpoint(options, pass, is_first ? x : x.t()); });
      text += error_of([&] {
        return is_first ? checkpoint(options, pass, x) : checkpoint(options, both, x, x);
      });
      options.name = is_first ? "Block" : "Head";
      text += error_of([&] { checkpoint(options, pass, x); });
      options.name = "Block";
      checkpoint(options, pass, x).sum().backward();
      return text;
    });
    for (const std::string& text : said) {
      for (const std::string other :
           {"Block(Float[32, 64])", "Block(Double[64, 64])",
            "Block(Float[64, 64] with strides [1, 64])", "Block(Float[64, 64], Float[64, 64])",
            "Head(Float[64, 64])"}) {
        CHECK_THAT(text, Catch::Contains("[checkpoint] ranks of partition= do different things: "
                                         "rank 0 checkpoints Block(Float[64, 64]); rank 1 "
                                         "checkpoints " +
                                         other + " (rank "));
      }
    }
  }
}

TEST_CASE("what is small, a leaf, or has gaps stays as it is, and may differ between ranks") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto results = on_ranks<int>(2, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      const auto own = static_cast<double>(rank.where.rank);
      Tensor leaf = input(own).requires_grad_();
      const Tensor gaps = torch::cat({input(own), input()}, 1).narrow(1, 32, 64);
      const Tensor small = torch::full({8}, own);
      int calls = 0;
      bool is_same = true;
      const auto function = [&](const Tensor& a, const Tensor& b, const Tensor& c,
                                const Tensor& common) {
        ++calls;
        is_same &= a.is_same(leaf) && b.strides() == gaps.strides() && c.is_same(small);
        return (a * b).sin() * c[0] + common.exp();
      };
      const Tensor common = input().clone();
      const Tensor out = checkpoint(options, function, leaf, gaps, small, common);
      const PartitionMemory memory = memory_of(options);
      out.sum().backward();
      return calls == 2 && is_same && memory.inputs == kBytes && leaf.grad().defined();
    });
    CHECK(results == std::vector<int>(2, 1));
  }
}

TEST_CASE("a tensor that comes again is kept once") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    struct Result {
      int64_t once = 0;
      int64_t changed = 0;
      std::string said = {};
    };
    const auto results = on_ranks<Result>(2, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      const Tensor mask = input(3).clone();
      const auto masked = [](const Tensor& value, const Tensor& by) { return (value * by).tanh(); };
      Tensor x = input() * torch::ones({}).requires_grad_();
      const Tensor first = checkpoint(options, masked, x, mask);
      const Tensor second = checkpoint(options, masked, first, mask);
      Result result;
      result.once = memory_of(options).inputs;
      mask.add_(1);
      const Tensor third = checkpoint(options, masked, second, mask);
      result.changed = memory_of(options).inputs;
      result.said = error_of([&] { third.sum().backward(); });
      return result;
    });
    for (const Result& result : results) {
      CHECK(result.once == 3 * kBytes);
      CHECK(result.changed == 5 * kBytes);
      CHECK_THAT(result.said,
                 Catch::Contains("modified by an inplace operation: input 1 of Block"));
    }
  }
}

TEST_CASE("nested checkpoints, several backwards and inputs changed by the function itself") {
  const std::vector<Tensor> expected = plain();
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto said = on_ranks<std::string>(2, engine, [&](ThreadRank& rank) {
      const CheckpointOptions options = partitioned(rank);
      std::string text;
      Net net;
      const auto outer = [&](const Tensor& x) { return net.forward(x, &options); };
      const Tensor loss = checkpoint(options, outer, input());
      loss.backward({}, /*retain_graph=*/true);
      for (Tensor& weight : net.weights) weight.mutable_grad() = Tensor();
      if (!equal(net.backward(loss), expected)) text += "other bits; ";
      const Tensor x = input() * torch::ones({}).requires_grad_();
      const auto in_place = [](Tensor value) { return value.mul_(2).exp(); };
      const Tensor changed = checkpoint(options, in_place, x);
      return text + error_of([&] { changed.sum().backward(); });
    });
    for (const std::string& text : said) {
      CHECK_THAT(text, Catch::StartsWith("[checkpoint] one of the variables needed for gradient "
                                         "computation has been modified by an inplace operation: "
                                         "input 0 of Block (Float[64, 64]) is at version 1, "
                                         "expected version 0 (rank "));
    }
  }
}

TEST_CASE("graphs may be dropped, and backwards run in another order where memory is shared") {
  const std::vector<Tensor> expected = plain();
  const auto results = on_ranks<int>(2, Engine::kShm, [&](ThreadRank& rank) {
    const CheckpointOptions options = partitioned(rank);
    std::vector<Net> nets(4);
    std::vector<Tensor> losses;
    for (Net& net : nets) losses.push_back(net.forward(input(), &options));
    losses[3] = Tensor();
    if (rank.where.rank == 1) losses[0] = Tensor();
    bool is_equal = memory_of(options).inputs == (rank.where.rank == 0 ? 9 : 6) * kBytes;
    const std::vector<size_t> order =
        rank.where.rank == 0 ? std::vector<size_t>{0, 1, 2} : std::vector<size_t>{2, 1};
    for (const size_t i : order) is_equal &= equal(nets[i].backward(losses[i]), expected);
    return is_equal && memory_of(options).inputs == 0;
  });
  CHECK(results == std::vector<int>(2, 1));
}

TEST_CASE("nothing lives on with a graph that is gone") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto results = on_ranks<int>(2, engine, [&](ThreadRank& rank) {
      const Tensor large = torch::ones({3, 1 << 18});  // two do not fit into the first segment
      const auto owners = rank.communicator.use_count();
      bool is_right = true;
      {
        const CheckpointOptions options = partitioned(rank);
        int64_t host = 0;
        for (int step = 0; step < 20; ++step) {
          Tensor out = checkpoint(
              options, [](const Tensor& x) { return x * 2; },
              large * torch::ones({}).requires_grad_());
          if (step == 0) host = memory_of(options).host;
          is_right &= memory_of(options).host == host;
          out = Tensor();
          is_right &= memory_of(options).inputs == 0;
          rank.communicator->barrier("all have let go").wait();
        }
      }
      return is_right && rank.communicator.use_count() == owners;
    });
    CHECK(results == std::vector<int>(2, 1));
  }
}

TEST_CASE("ranks that gather slices in another order all raise") {
  const auto said = on_ranks<std::string>(2, Engine::kGloo, [&](ThreadRank& rank) {
    const CheckpointOptions options = partitioned(rank);
    std::vector<Net> nets(2);
    std::vector<Tensor> losses;
    for (Net& net : nets) losses.push_back(net.forward(input(), &options));
    return error_of([&] { losses[static_cast<size_t>(rank.where.rank)].backward(); });
  });
  for (const std::string& text : said) {
    CHECK_THAT(text, Catch::Contains("rank 0 recomputes from input 0 of Block (Float[64, 64]) of "
                                     "its packing 3; rank 1 recomputes from input 0 of Block "
                                     "(Float[64, 64]) of its packing 6 (rank "));
  }
}

TEST_CASE("ranks of several hosts keep a slice each") {
  const std::vector<Tensor> expected = plain();
  const std::string hosts = "aab";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<ThreadRank> ranks(hosts.size());  // alive until all have ended
  std::vector<std::string> said(hosts.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < hosts.size(); ++r) {
    threads.emplace_back([&, r] {
      ThreadRank& rank = ranks[r];
      try {
        at::set_num_threads(1);
        rank.where = {static_cast<int64_t>(r), static_cast<int64_t>(hosts.size())};
        rank.group = make_shm_group(store, rank.where,
                                    {.timeout = kTimeout,
                                     .connect_timeout = kTimeout,
                                     .hostname = "127.0.0.1",
                                     .host_partition = hosts.substr(r, 1)});
        rank.communicator = make_communicator(rank.group, store);
        const CheckpointOptions options = partitioned(rank);
        Net net;
        const Tensor loss = net.forward(input(), &options);
        const PartitionMemory kept = memory_of(options);
        const bool is_sliced = kept.shared == 0 && kept.slices < kept.inputs / 2;
        said[r] = is_sliced && equal(net.backward(loss), expected) ? "equal" : "differs";
      } catch (const std::exception& error) {
        said[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(said == std::vector<std::string>(3, "equal"));
}

TEST_CASE("two groups at once, and a group of one rank") {
  const auto results = on_ranks<int>(4, Engine::kShm, [&](ThreadRank& rank) {
    const int first = rank.where.rank < 2 ? 0 : 2;
    const auto pair = rank.communicator->split({first, first + 1}, "pairs");
    const auto alone = rank.communicator->split({static_cast<int>(rank.where.rank)}, "alone");
    CheckpointOptions of_pair, of_all, of_one;
    of_pair.partition = make_partition_packer(pair);
    of_all.partition = make_partition_packer(rank.communicator);
    of_one.partition = make_partition_packer(alone);
    const auto own = static_cast<double>(rank.where.rank);
    bool is_equal = true;
    Net a, b, c;
    const Tensor loss_a = a.forward(input(first), &of_pair);
    const Tensor loss_b = b.forward(input(), &of_all);
    const Tensor loss_c = c.forward(input(own), &of_one);
    is_equal &= memory_of(of_pair).shared == 3 * kBytes && memory_of(of_all).shared == 3 * kBytes;
    is_equal &= memory_of(of_one).inputs == 0;
    return is_equal && equal(b.backward(loss_b), plain()) &&
           equal(a.backward(loss_a), plain(first)) && equal(c.backward(loss_c), plain(own));
  });
  CHECK(results == std::vector<int>(4, 1));
}

namespace {

struct Called final : std::runtime_error, Interruption {
  Called() : std::runtime_error("called"), Interruption("Called was raised by a signal handler") {}
};
thread_local bool is_called_away = false;

void look_for_calls() {
  if (is_called_away) throw Called();
}

}  // namespace

TEST_CASE("a rank that is called away while it packs tells the others, and the next step works") {
  set_interruption_check(&look_for_calls);
  const std::vector<Tensor> expected = plain();
  std::latch has_left(1);
  const auto said = on_ranks<std::string>(2, Engine::kShm, [&](ThreadRank& rank) {
    const CheckpointOptions options = partitioned(rank);
    const auto train = [&] {
      Net net;
      return equal(net.backward(net.forward(input(), &options)), expected);
    };
    bool is_equal = train();
    std::string text;
    if (rank.where.rank == 1) {
      is_called_away = true;
      try {
        train();
      } catch (const Called&) {
        text = "called";
      }
      is_called_away = false;
      has_left.count_down();
    } else {
      has_left.wait();
      text = error_of<c10::DistBackendError>([&] { train(); });
    }
    is_equal &= train() && train();
    return text + (is_equal ? "" : " (other bits)");
  });
  CHECK_THAT(said[0], Catch::Contains("Called was raised by a signal handler") &&
                          !Catch::Contains("other bits"));
  CHECK(said[1] == "called");
}

}  // namespace trireme::partition_test
