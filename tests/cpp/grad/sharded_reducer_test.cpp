// The reducer where each rank keeps its shards of the gradients. With a recorded group one rank
// runs, and the peer holds the same gradients, so the average is this rank's own; ranks that share
// memory run as threads.

#include <trireme/grad/grad_reducer.h>
#include <trireme/strategies/zero/shard_delivery.h>

#include <torch/csrc/autograd/autograd.h>

#include <catch_torch.h>
#include <recording_communicator.h>
#include <sys/mman.h>
#include <thread_ranks.h>
#include <unistd.h>
#include <vector>

namespace trireme::sharded_reducer_test {

using trireme::test::Engine;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::WireRecord;

namespace {

// y = (a + b + ...) * factor of the parameters used; each has four floats, of which rank 0 of 2
// owns the first two. Armed at its parameters, as the sharded optimizers do.
struct Sum {
  explicit Sum(std::string letters, std::shared_ptr<Communicator> over, int64_t numel = 4,
               ShardPlacement placement = ShardPlacement::kDim0)
      : names(std::move(letters)), communicator(std::move(over)) {
    NamedParameters parameters;
    for (const char name : names) {
      weights.push_back(at::full({numel}, 2.0F).set_requires_grad(true));
      parameters.names.emplace_back(1, name);
      parameters.tensors.push_back(weights.back());
      parameters.sparse_gradient.push_back(false);
    }
    GradReducerOptions options;
    options.caps = {{numel * 4}};  // one parameter per bucket
    options.area = "zero";
    const OwnShards own{std::make_shared<const ShardPlan>(make_shard_plan(
                            {describe_parameters(parameters), communicator->world(), placement})),
                        communicator->rank()};
    delivery = std::make_shared<ShardDelivery>(trigger, own);
    reducer = GradReducer::make(parameters, {communicator, trigger, delivery}, options);
  }

  void backward(const std::string& used, double factor) {
    at::Tensor y = at::zeros_like(weights.front().detach());
    for (const char name : used) y = y + weights[names.find(name)] * factor;
    torch::autograd::backward({y.sum()}, {});
  }
  void zero_grad() {
    for (const at::Tensor& weight : weights) weight.mutable_grad().reset();
    delivery->drop_set_aside();
  }
  at::Tensor grad(char name) const { return weights[names.find(name)].grad(); }
  std::vector<float> values(char name) const {
    const at::Tensor found = grad(name);
    if (!found.defined()) return {};
    return {found.const_data_ptr<float>(), found.const_data_ptr<float>() + found.numel()};
  }

  std::string names;
  std::shared_ptr<Communicator> communicator;
  std::vector<at::Tensor> weights;
  std::shared_ptr<BackwardTrigger> trigger =
      std::make_shared<BackwardTrigger>(/*at_parameters=*/true);
  std::shared_ptr<ShardDelivery> delivery;
  std::shared_ptr<GradReducer> reducer;
};

using Floats = std::vector<float>;
using Indices = std::vector<int64_t>;

std::shared_ptr<RecordingCommunicator> recorded(int64_t rank = 0) {
  return std::make_shared<RecordingCommunicator>(RankOf{rank, 2});
}

}  // namespace

TEST_CASE("a rank keeps its shard of the average and zeros elsewhere") {
  for (const int64_t rank : {0, 1}) {
    Sum sum("ab", recorded(rank));
    for (const double factor : {3.0, 5.0, 7.0}) {
      sum.zero_grad();
      sum.backward("ab", factor);
      const auto value = static_cast<float>(factor);
      const Floats own = rank == 0 ? Floats{value, value, 0, 0} : Floats{0, 0, value, value};
      CHECK(sum.values('a') == own);
      CHECK(sum.values('b') == own);
      CHECK(sum.delivery->changed_gradients().empty());
    }
  }
}

TEST_CASE("a step without shared memory: one reduce_scatter per bucket, then the used-map") {
  const auto transport = recorded();
  Sum sum("abc", transport);
  sum.backward("abc", 1);  // teaches the order
  sum.zero_grad();
  transport->clear();
  sum.backward("abc", 1);
  std::vector<std::string> verbs;
  std::vector<int64_t> bytes;
  for (const WireRecord& record : transport->records()) {
    CHECK(record.dtypes == std::vector<std::string>{"Float"});
    verbs.push_back(record.verb);
    bytes.push_back(record.bytes);
  }
  const std::string scatter = "reduce_scatter";
  CHECK(verbs == std::vector<std::string>{scatter, scatter, scatter, "all_reduce"});
  CHECK(bytes == std::vector<int64_t>{16, 16, 16, 4 * 4});  // three counts and a flag
}

TEST_CASE("a step under another placement: one all-reduce per bucket, the used-map in the last") {
  const auto transport = recorded();
  Sum sum("abc", transport, 4, ShardPlacement::kWhole);
  sum.backward("abc", 1);  // teaches the order
  sum.zero_grad();
  transport->clear();
  sum.backward("abc", 1);
  std::vector<int64_t> bytes;
  for (const WireRecord& record : transport->records()) {
    CHECK(record.verb == "all_reduce");
    bytes.push_back(record.bytes);
  }
  CHECK(bytes == std::vector<int64_t>{16, 16, 16 + 4 * 4});
}

TEST_CASE("what others own takes no memory") {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  constexpr int64_t kPages = 64;
  Sum sum("a", recorded(), kPages * page / 4);
  for (int64_t step = 0; step < 3; ++step) {
    sum.zero_grad();
    sum.backward("a", 1);
  }
  const at::Tensor grad = sum.grad('a');
  std::vector<unsigned char> in_memory(kPages);
  REQUIRE(::mincore(grad.mutable_data_ptr(), static_cast<size_t>(kPages * page),
                    in_memory.data()) == 0);
  int64_t resident = 0;
  for (const unsigned char bits : in_memory) resident += bits & 1;
  CHECK(resident == kPages / 2);
  CHECK(grad.sum().item<double>() == static_cast<double>(grad.numel()) / 2);
}

TEST_CASE("backwards that synchronize add up, in the same tensor") {
  Sum sum("ab", recorded());
  sum.backward("ab", 1);
  const at::Tensor grad = sum.grad('a');
  sum.backward("ab", 2);
  sum.backward("b", 4);
  CHECK(sum.values('a') == Floats{3, 3, 0, 0});
  CHECK(sum.values('b') == Floats{7, 7, 0, 0});
  CHECK(sum.grad('a').is_same(grad));
  CHECK(sum.delivery->changed_gradients().empty());
}

TEST_CASE("without synchronizing gradients accumulate apart from what was averaged") {
  const auto transport = recorded();
  Sum sum("ab", transport);
  sum.backward("ab", 1);
  transport->clear();
  sum.trigger->set_synchronize(false);
  sum.backward("ab", 2);
  sum.backward("a", 4);
  CHECK(transport->records().empty());
  CHECK(sum.values('a') == Floats{6, 6, 6, 6});  // this rank's alone
  CHECK(sum.delivery->changed_gradients() == Indices{0, 1});
  sum.trigger->set_synchronize(true);
  sum.backward("a", 8);
  CHECK(sum.values('a') == Floats{15, 15, 0, 0});
  CHECK(sum.values('b') == Floats{3, 3, 0, 0});  // not used by this one, but since the last
  CHECK(sum.delivery->changed_gradients().empty());
}

TEST_CASE("zero_grad forgets what was set aside") {
  Sum sum("a", recorded());
  sum.backward("a", 1);
  sum.trigger->set_synchronize(false);
  sum.backward("a", 2);
  sum.zero_grad();
  sum.trigger->set_synchronize(true);
  sum.backward("a", 4);
  CHECK(sum.values('a') == Floats{4, 4, 0, 0});
}

TEST_CASE("what nobody uses keeps its .grad, or has none") {
  Sum sum("abc", recorded());
  sum.backward("ab", 1);
  CHECK_FALSE(sum.grad('c').defined());
  const at::Tensor kept = sum.grad('b');
  for (int64_t step = 0; step < 4; ++step) sum.backward("a", 1);
  CHECK(sum.values('a') == Floats{5, 5, 0, 0});
  CHECK(sum.values('b') == Floats{1, 1, 0, 0});
  CHECK(sum.grad('b').is_same(kept));
  CHECK_FALSE(sum.grad('c').defined());
}

TEST_CASE("a gradient that is not as backward left it is seen") {
  Sum sum("abcd", recorded());
  sum.backward("abcd", 1);
  sum.grad('a').mul_(2);
  sum.weights[1].mutable_grad() = at::ones({4});
  sum.grad('c').zero_();
  sum.weights[3].mutable_grad().reset();
  CHECK(sum.delivery->changed_gradients() == Indices{0, 1});
  CHECK(sum.delivery->changed_gradients(/*allowed=*/1) == Indices{1});
  SECTION("and not forgotten when the next backward adds to it") {
    sum.backward("abcd", 1);
    CHECK(sum.delivery->changed_gradients(/*allowed=*/1) == Indices{0, 1});
  }
  SECTION("until it is gone") {
    sum.zero_grad();
    sum.backward("abcd", 1);
    CHECK(sum.delivery->changed_gradients().empty());
  }
}

TEST_CASE("ranks that share memory: after an abandoned backward the next ones work") {
  constexpr int64_t kWorld = 2;
  std::vector<std::string> said(kWorld);
  std::vector<std::vector<Floats>> seen(kWorld);
  run_thread_ranks(
      kWorld,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        Sum sum("ab", rank.communicator);
        bool spills = false;
        sum.weights[0].register_hook(
            [&](const at::Tensor&) { TORCH_CHECK(!spills, "spilled the coffee"); });
        const double factor = rank.where.rank == 0 ? 1 : 3;  // 2 on average
        for (int64_t step = 0; step < 3; ++step) sum.backward("ab", factor);
        spills = rank.where.rank == 1;
        try {
          sum.backward("ab", factor);
        } catch (const std::exception& error) {
          said[own] = error.what();
        }
        spills = false;
        sum.zero_grad();
        for (int64_t step = 0; step < 2; ++step) {
          sum.backward(rank.where.rank == 0 ? "a" : "ab", factor);
          seen[own].push_back(sum.values('a'));
          seen[own].push_back(sum.values('b'));
        }
      },
      std::chrono::seconds(20), Engine::kShm);
  CHECK_THAT(said[1], Catch::Contains("spilled the coffee"));
  CHECK_THAT(said[0], Catch::Contains("[zero] backward 4 was abandoned"));
  CHECK(seen[0] == std::vector<Floats>{{2, 2, 0, 0}, {1.5, 1.5, 0, 0}, {4, 4, 0, 0}, {3, 3, 0, 0}});
  CHECK(seen[1] == std::vector<Floats>{{0, 0, 2, 2}, {0, 0, 1.5, 1.5}, {0, 0, 4, 4}, {0, 0, 3, 3}});
}

}  // namespace trireme::sharded_reducer_test
