// A bucket that is reduce_scattered, drawn as what goes over the transport: one run per rank, of
// what that rank owns of each gradient, padded to the longest.

#include <trireme/grad/run_bucket.h>

#include <trireme/memory/buffer_pool.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <string>

namespace trireme::run_bucket_test {

namespace {

// Gradients of five and of three elements, of which rank 0 of 2 owns three and two.
struct Gradients {
  explicit Gradients(at::ScalarType transport = at::kFloat) {
    std::vector<ParameterInfo> infos;
    for (const int64_t numel : {5, 3}) {
      parameters.push_back(at::zeros({numel}).set_requires_grad(true));
      infos.push_back({"p", {numel}, numel});
    }
    const OwnShards own{std::make_shared<const ShardPlan>(
        make_shard_plan({infos, /*world=*/2, ShardPlacement::kDim0}))};
    PlannedBucket plan;
    plan.dtype = transport;
    plan.numel = 8;
    plan.slots = {{0, 0, 5}, {1, 5, 3}};
    bucket = std::make_unique<RunBucket>(plan, parameters, infos, own,
                                         std::make_shared<BufferPool>(c10::kCPU));
  }
  void set(size_t parameter, double first) {
    const int64_t numel = parameters[parameter].numel();
    parameters[parameter].mutable_grad() = at::arange(numel).to(at::kFloat) + first;
  }
  bool has_any() const { return parameters[0].grad().defined() || parameters[1].grad().defined(); }
  // Runs parted by '|'.
  std::string transport() const {
    const at::Tensor runs = bucket->transport().to(at::kFloat).view({2, -1});
    std::string picture;
    for (int64_t rank = 0; rank < 2; ++rank) {
      if (rank > 0) picture += "| ";
      for (int64_t i = 0; i < runs.size(1); ++i)
        picture += std::to_string(runs[rank][i].item<int>()) + " ";
    }
    return picture;
  }

  std::vector<at::Tensor> parameters;
  std::unique_ptr<RunBucket> bucket;
};

}  // namespace

TEST_CASE("runs of what each rank owns, padded with zeros; gradients are gone") {
  for (const at::ScalarType transport : {at::kFloat, at::kBFloat16, at::kDouble}) {
    Gradients gradients(transport);
    gradients.bucket->begin_step(/*shadow=*/false);
    gradients.set(0, 1);
    gradients.set(1, 6);
    gradients.bucket->complete(2);
    CHECK(gradients.transport() == "2 4 6 12 14 | 8 10 0 16 0 ");
    CHECK(gradients.bucket->transport().scalar_type() == transport);
    CHECK(gradients.bucket->sums().numel() == 5);
    CHECK_FALSE(gradients.has_any());
  }
}

TEST_CASE("gradients that come one by one, twice, or not at all") {
  Gradients gradients;
  gradients.bucket->begin_step(/*shadow=*/false);
  gradients.set(0, 1);
  gradients.bucket->gradient_arrived(0, /*scale=*/1);
  CHECK_FALSE(gradients.has_any());  // freed at once
  gradients.set(0, 1);
  gradients.bucket->gradient_arrived(0, /*scale=*/1);
  gradients.bucket->complete(1);
  CHECK(gradients.transport() == "2 4 6 0 0 | 8 10 0 0 0 ");
}

TEST_CASE("what was accumulated before goes too, at the end") {
  Gradients gradients;
  gradients.set(1, 1);
  gradients.bucket->begin_step(/*shadow=*/false);
  gradients.set(0, 1);
  gradients.bucket->gradient_arrived(0, /*scale=*/1);
  gradients.bucket->complete(1);
  CHECK(gradients.transport() == "1 2 3 1 2 | 4 5 0 3 0 ");
}

TEST_CASE("of the sums what was chosen, neighbours as one, and what this rank owns of each") {
  Gradients gradients;
  gradients.bucket->begin_step(/*shadow=*/false);
  gradients.set(0, 1);
  gradients.set(1, 6);
  gradients.bucket->complete(1);
  gradients.bucket->sums().copy_(at::arange(5));  // rank 0 has 3 elements and 2
  const auto both = gradients.bucket->sums_of({true, true});
  REQUIRE(both.size() == 1);
  CHECK(both.front().equal(gradients.bucket->sums()));
  const auto second = gradients.bucket->sums_of({false, true});
  REQUIRE(second.size() == 1);
  CHECK(second.front().equal(at::tensor({3.0F, 4.0F})));
  CHECK(gradients.bucket->sums_of({false, false}).empty());
  gradients.bucket->own_sum(1).mul_(2);
  CHECK(gradients.bucket->sums().equal(at::tensor({0.0F, 1.0F, 2.0F, 6.0F, 8.0F})));
}

TEST_CASE("a shadow step sends zeros and leaves gradients alone") {
  Gradients gradients;
  gradients.set(0, 1);
  gradients.bucket->begin_step(/*shadow=*/true);
  gradients.bucket->complete(1);
  CHECK(gradients.transport() == "0 0 0 0 0 | 0 0 0 0 0 ");
  CHECK(gradients.parameters[0].grad().sum().item<float>() == 15);
}

}  // namespace trireme::run_bucket_test
