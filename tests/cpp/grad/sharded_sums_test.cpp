// What happens to sums, of which each rank has its shards, before they become .grad. One rank runs
// in recorded groups: two ranks share parameters, two have the same shards, and all peers hold the
// same gradients, so that the average over all four is this rank's own.

#include <trireme/grad/collective_transport.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/strategies/fsdp/owner_delivery.h>

#include <torch/csrc/autograd/autograd.h>

#include <catch_torch.h>
#include <functional>
#include <recording_communicator.h>

namespace trireme::sharded_sums_test {

using trireme::test::RecordingCommunicator;
using trireme::test::WireRecord;

namespace {

using Floats = std::vector<float>;

Floats values_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<float>(), tensor.const_data_ptr<float>() + tensor.numel()};
}

// y = (a + b + ...) * factor of the parameters used; each has three floats, of which rank 0 owns
// two, and all share one bucket.
struct ShardSum {
  using Wrap =
      std::function<std::unique_ptr<OuterAllReduce>(std::unique_ptr<OuterAllReduce> inner)>;

  explicit ShardSum(std::string letters, const Wrap& wrap = {}) : names(std::move(letters)) {
    NamedParameters parameters;
    for (const char name : names) {
      weights.push_back(at::ones({3}).set_requires_grad(true));
      owners.push_back(at::ones({2}).set_requires_grad(true));
      parameters.names.emplace_back(1, name);
      parameters.tensors.push_back(weights.back());
      parameters.sparse_gradient.push_back(false);
    }
    const OwnShards own{std::make_shared<const ShardPlan>(make_shard_plan(
                            {describe_parameters(parameters), 2, ShardPlacement::kDim0})),
                        sharers->rank()};
    delivery = std::make_shared<OwnerDelivery>(trigger, OwnerDelivery::Owners{own, owners, true});
    auto outer = make_replica_sum(replicas);
    if (wrap) outer = wrap(std::move(outer));
    auto transport = std::make_unique<CollectiveTransport>(all, sharers, std::move(outer));
    reducer = GradReducer::make(parameters, {all, trigger, delivery, std::move(transport)}, {});
  }

  void backward(const std::string& used, double factor) {
    at::Tensor y = at::zeros({3});
    for (const char name : used) y = y + weights[names.find(name)] * factor;
    torch::autograd::backward({y.sum()}, {});
  }
  Floats grad(char name) const { return values_of(owners[names.find(name)].grad()); }
  std::vector<int64_t> replicated_bytes() const {
    std::vector<int64_t> bytes;
    for (const WireRecord& record : replicas->records()) bytes.push_back(record.bytes);
    replicas->clear();
    return bytes;
  }

  std::string names;
  std::shared_ptr<RecordingCommunicator> all =
      std::make_shared<RecordingCommunicator>(RankOf{0, 4});
  std::shared_ptr<RecordingCommunicator> sharers =
      std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  std::shared_ptr<RecordingCommunicator> replicas =
      std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> owners;
  std::shared_ptr<BackwardTrigger> trigger =
      std::make_shared<BackwardTrigger>(/*at_parameters=*/true);
  std::shared_ptr<OwnerDelivery> delivery;
  std::shared_ptr<GradReducer> reducer;
};

using Bytes = std::vector<int64_t>;

}  // namespace

TEST_CASE("sums that wait are summed up over replicas once, with the next ones") {
  ShardSum sum("ab");
  sum.delivery->defer_all_reduce({true, true});
  for (const double factor : {1.0, 2.0}) sum.backward("ab", factor);
  CHECK(sum.replicated_bytes().empty());
  CHECK(sum.grad('a').empty());
  sum.delivery->defer_all_reduce({false, false});
  sum.backward("ab", 4);
  CHECK(sum.replicated_bytes() == Bytes{16});
  CHECK(sum.grad('a') == Floats{7, 7});
  CHECK(sum.grad('b') == Floats{7, 7});
  sum.backward("ab", 8);
  CHECK(sum.grad('a') == Floats{15, 15});
}

TEST_CASE("of one bucket some wait, and the neighbours of others go as one") {
  ShardSum sum("abcd");
  sum.delivery->defer_all_reduce({false, true, false, false});
  sum.backward("abcd", 1);
  CHECK(sum.replicated_bytes() == Bytes{24});  // one list
  CHECK(sum.grad('a') == Floats{1, 1});
  CHECK(sum.grad('b').empty());
  sum.delivery->defer_all_reduce({false, false, false, false});
  sum.backward("acd", 2);  // not b, which some backward before has used
  CHECK(sum.grad('b') == Floats{1, 1});
  CHECK(sum.grad('c') == Floats{3, 3});
}

TEST_CASE("what was accumulated before goes into a sum that waits, once") {
  ShardSum sum("a");
  sum.trigger->set_synchronize(false);
  sum.backward("a", 1);
  sum.trigger->set_synchronize(true);
  sum.delivery->defer_all_reduce({true});
  sum.backward("a", 2);
  sum.delivery->defer_all_reduce({false});
  sum.backward("a", 4);
  CHECK(sum.grad('a') == Floats{7, 7});
}

TEST_CASE("outputs that nobody found do not synchronize what is told not to") {
  ShardSum sum("a");
  sum.trigger->set_synchronize(false);
  sum.trigger->before_forward();
  sum.trigger->after_forward({}, /*synchronize=*/true, /*all_found=*/false);
  sum.backward("a", 1);
  CHECK(sum.all->records().empty());
  CHECK(sum.grad('a').empty());
  CHECK(sum.weights[0].grad().defined());
  sum.trigger->set_synchronize(true);
  sum.backward("a", 2);
  CHECK(sum.grad('a') == Floats{3, 3});
}

TEST_CASE("sums that wait outlive backwards that only accumulate, and end with what is dropped") {
  ShardSum sum("ab");
  sum.delivery->defer_all_reduce({true, true});
  sum.backward("ab", 1);
  sum.delivery->defer_all_reduce({false, false});
  sum.delivery->hold({true, false});
  sum.backward("b", 2);
  CHECK(sum.grad('a').empty());
  CHECK(sum.grad('b') == Floats{3, 3});
  sum.delivery->hold({false, false});
  SECTION("summed up") {
    sum.backward("b", 4);
    CHECK(sum.grad('a') == Floats{1, 1});
  }
  SECTION("dropped") {
    sum.delivery->drop_accumulated();
    sum.backward("a", 4);
    CHECK(sum.grad('a') == Floats{4, 4});
  }
}

namespace {

// Notes what goes over to the replicas, and sends half of it.
class HalfAcross final : public OuterAllReduce {
 public:
  HalfAcross(std::unique_ptr<OuterAllReduce> inner, std::vector<std::string>& labels)
      : inner_(std::move(inner)), labels_(labels) {}
  Pending sum(std::vector<at::Tensor> sums, const std::string& label) override {
    labels_.push_back(label);
    for (const at::Tensor& values : sums) values.mul_(0.5);
    return inner_->sum(std::move(sums), label);
  }
  void announce_failure(const std::string& text) noexcept override {
    inner_->announce_failure(text);
  }

 private:
  std::unique_ptr<OuterAllReduce> inner_;
  std::vector<std::string>& labels_;
};

}  // namespace

TEST_CASE("what the outer stage sums can be wrapped, and is all that replicas get") {
  std::vector<std::string> labels;
  ShardSum sum("ab", [&labels](std::unique_ptr<OuterAllReduce> inner) {
    return std::make_unique<HalfAcross>(std::move(inner), labels);
  });
  sum.delivery->defer_all_reduce({false, true});
  sum.backward("ab", 4);
  CHECK(sum.replicated_bytes() == Bytes{8});
  CHECK(sum.grad('a') == Floats{2, 2});
  sum.delivery->defer_all_reduce({false, false});
  sum.backward("b", 4);
  CHECK(sum.grad('b') == Floats{4, 4});
  CHECK(labels == std::vector<std::string>{"bucket 0: b .. a", "bucket 0: b .. a"});
}

TEST_CASE("who asks is shown divided sums, in the order of the plan, before they become .grad") {
  ShardSum sum("abc");
  sum.delivery->set_divide_factors({2, 0, 0});
  std::vector<std::vector<int64_t>> shown;
  sum.delivery->set_summed_callback({true, false, true}, [&](const std::vector<OwnSum>& sums) {
    shown.emplace_back();
    for (const OwnSum& own : sums) {
      shown.back().push_back(own.parameter);
      shown.back().push_back(own.longest);
      shown.back().push_back(own.values[0].item<int64_t>());
      own.values.mul_(10);
    }
    CHECK(sum.grad('b') == Floats{3, 3});  // was not asked for
    CHECK(sum.grad('a').empty());
  });
  sum.backward("ab", 3);
  CHECK(shown == std::vector<std::vector<int64_t>>{{2, 2, 0, 0, 2, 6}});
  CHECK(sum.grad('a') == Floats{60, 60});  // divided by 2 in place of 4
  CHECK(sum.grad('c').empty());            // no rank used it
  sum.delivery->set_summed_callback({true, true, true}, nullptr);
  sum.backward("ab", 1);
  CHECK(sum.grad('a') == Floats{62, 62});
}

TEST_CASE("what throws when it is shown sums leaves backward, and the others are told") {
  ShardSum sum("a");
  sum.delivery->set_summed_callback({true}, [](const std::vector<OwnSum>& /*sums*/) {
    TORCH_CHECK(false, "spilled the coffee");
  });
  CHECK_THROWS_WITH(sum.backward("a", 1), Catch::Contains("spilled the coffee"));
  CHECK_THAT(sum.all->failure().value_or(""), Catch::Contains("backward 1 was abandoned"));
  CHECK(sum.grad('a').empty());
}

}  // namespace trireme::sharded_sums_test
