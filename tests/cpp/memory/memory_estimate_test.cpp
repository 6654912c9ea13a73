#include <trireme/memory/memory_estimate.h>

#include <trireme/memory/shard_plan.h>

#include <algorithm>
#include <catch_torch.h>
#include <memory/parameter.h>
#include <numeric>
#include <shm/shm_ranks.h>
#include <vector>

namespace trireme::memory_estimate_test {

using trireme::test::parameter;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kDepositRing = 8 * kMiB;

MemoryEstimate estimate(const std::vector<ParameterInfo>& parameters, std::string_view strategy,
                        int64_t world, int64_t ranks_per_host = 0) {
  return estimate_memory({.parameters = parameters,
                          .strategy = training_strategy(strategy),
                          .world = world,
                          .ranks_per_host = ranks_per_host > 0 ? ranks_per_host : world});
}

// Bytes per element of parameters | gradients | optimizer's state: of a rank, of the host.
std::string drawn(const MemoryEstimate& found, int64_t numel) {
  std::string picture;
  for (const MemoryBytes& bytes : {found.rank, found.host}) {
    if (!picture.empty()) picture += "  ";
    picture += std::to_string(bytes.parameters / numel) + '|' +
               std::to_string(bytes.gradients / numel) + '|' +
               std::to_string(bytes.optimizer / numel);
  }
  return picture;
}

int64_t in_tenths_of_gb(int64_t bytes) { return (bytes + 50'000'000) / 100'000'000; }

}  // namespace

TEST_CASE("the ZeRO paper's row: 7.5e9 parameters, 64 ranks") {
  const std::vector<ParameterInfo> model = {parameter({7'500'000'000})};
  const auto tenths = [&](std::string_view strategy) {
    const MemoryEstimate found = estimate_memory({.parameters = model,
                                                  .strategy = training_strategy(strategy),
                                                  .world = 64,
                                                  .ranks_per_host = 8,
                                                  .accounting = memory_accounting("paper")});
    CHECK(found.host.total() == 8 * found.rank.total());
    CHECK(found.rank.buffers == 0);
    return in_tenths_of_gb(found.rank.total());
  };
  CHECK(tenths("ddp") == 1200);
  CHECK(tenths("dp") == 1200);
  CHECK(tenths("zero1") == 314);
  CHECK(tenths("zero2") == 166);
  CHECK(tenths("fsdp") == 19);
  CHECK(tenths("zero3") == 19);
  CHECK(tenths("fully_shard") == 19);
}

TEST_CASE("fp32 with AdamW on one host: who keeps what") {
  const int64_t numel = 64 * 1024;
  const std::vector<ParameterInfo> model = {parameter({64, 1024})};
  CHECK(drawn(estimate(model, "single", 1), numel) == "4|4|8  4|4|8");
  CHECK(drawn(estimate(model, "dp", 4), numel) == "1|4|2  4|16|8");
  CHECK(drawn(estimate(model, "ddp", 4), numel) == "4|4|8  16|16|32");
  CHECK(drawn(estimate(model, "zero1", 4), numel) == "1|4|2  4|16|8");
  CHECK(drawn(estimate(model, "zero2", 4), numel) == "1|1|2  4|4|8");
  CHECK(drawn(estimate(model, "fsdp", 4), numel) == "1|1|2  4|4|8");
  SECTION("a world of one is a single process, whatever it is called") {
    for (const std::string_view strategy : {"dp", "ddp", "zero1", "zero2", "fsdp"}) {
      CHECK(estimate(model, strategy, 1) == estimate(model, "single", 1));
    }
  }
}

TEST_CASE("several hosts: state over all ranks, parameters as the strategy can have them") {
  const int64_t numel = 64 * 1024;
  const std::vector<ParameterInfo> model = {parameter({64, 1024})};
  CHECK(drawn(estimate(model, "ddp", 8, 4), numel) == "4|4|8  16|16|32");
  CHECK(drawn(estimate(model, "zero1", 8, 4), numel) == "4|4|1  16|16|4");
  CHECK(drawn(estimate(model, "fsdp", 4, 2), numel) == "2|1|2  4|2|4");
  CHECK(drawn(estimate(model, "fsdp", 4, 1), numel) == "1|1|2  1|1|2");
}

TEST_CASE("without a store every rank keeps its parameters") {
  const std::vector<ParameterInfo> model = {parameter({64, 1024})};
  const int64_t bytes = 4 * 64 * 1024;
  const MemoryEstimate shared = estimate(model, "zero2", 4);
  const MemoryEstimate found = estimate_memory({.parameters = model,
                                                .strategy = TrainingStrategy::kZero2,
                                                .world = 4,
                                                .ranks_per_host = 4,
                                                .host_params = false});
  CHECK(found.rank.parameters == bytes);
  CHECK(found.host.parameters == 4 * bytes);
  CHECK(found.rank.buffers == shared.rank.buffers);
  CHECK(found.rank.optimizer == shared.rank.optimizer);
}

TEST_CASE("fully_shard that gathers keeps shards, two units, three buckets and Gloo's two blocks") {
  const std::vector<ParameterInfo> model = {parameter({64, 1024 * 1024})};
  const int64_t whole = 256 * kMiB;
  const auto gathered = [&](int64_t world, int64_t ranks_per_host, int64_t unit_numel) {
    return estimate_memory({.parameters = model,
                            .strategy = TrainingStrategy::kFsdp,
                            .world = world,
                            .ranks_per_host = ranks_per_host,
                            .host_params = ranks_per_host == 1,
                            .unit_numel = unit_numel});
  };
  const int64_t unit = 4 * 1024 * 1024;
  for (const int64_t ranks_per_host : {1, 2, 4}) {  // alone on their hosts, or over Gloo
    const MemoryEstimate found = gathered(4, ranks_per_host, unit);
    CHECK(found.rank.parameters == whole / 4);
    CHECK(found.rank.gradients == whole / 4);
    CHECK(found.rank.optimizer == whole / 2);
    CHECK(found.rank.buffers == 2 * 4 * unit + (3 + 2) * 25 * kMiB);
    CHECK(found.host.parameters == ranks_per_host * whole / 4);
    CHECK(found.host.buffers == ranks_per_host * found.rank.buffers);
  }
  SECTION("a model in one unit is there once, whatever its size") {
    const int64_t beside = 5 * 25 * kMiB;
    CHECK(gathered(4, 1, 0).rank.buffers == whole + beside);
    CHECK(gathered(4, 1, 48 * 1024 * 1024).rank.buffers == whole + beside);
    CHECK(gathered(4, 1, int64_t{1} << 62).rank.buffers == whole + beside);
    CHECK(gathered(1, 1, unit) == estimate(model, "single", 1));
  }
  SECTION("of a small one buckets hold no more than its gradients") {
    const std::vector<ParameterInfo> small = {parameter({1024})};
    CHECK(estimate(small, "fsdp", 4, 1).rank.buffers == 3 * 4096);
  }
}

TEST_CASE("shards are those of the fullest rank and host, as the plan has them") {
  const std::vector<ParameterInfo> model = {parameter({7, 3}), parameter({}), parameter({2, 5}),
                                            parameter({0, 4}), parameter({64})};
  for (int64_t world = 1; world < 10; ++world) {
    const ShardPlan plan = make_shard_plan({model, world, ShardPlacement::kDim0});
    std::vector<int64_t> numel(static_cast<size_t>(world), 0);
    for (size_t i = 0; i < model.size(); ++i)
      for (int64_t rank = 0; rank < world; ++rank)
        numel[static_cast<size_t>(rank)] += plan.of(static_cast<int64_t>(i), rank).numel;
    for (int64_t ranks = 1; ranks <= world; ++ranks) {
      const MemoryEstimate found = estimate(model, "zero2", world, ranks);
      CHECK(found.rank.gradients == 4 * *std::max_element(numel.begin(), numel.end()));
      CHECK(found.host.optimizer ==
            8 * std::accumulate(numel.begin(), numel.begin() + ranks, int64_t{0}));
    }
  }
}

TEST_CASE("dtypes, frozen parameters and optimizers") {
  std::vector<ParameterInfo> model = {parameter({16}), parameter({32}, at::kBFloat16),
                                      parameter({8}, at::kDouble),
                                      parameter({8}, at::kComplexFloat)};
  const auto bytes = [&](OptimizerState optimizer, std::optional<at::ScalarType> grad_dtype = {}) {
    return estimate_memory({.parameters = model,
                            .strategy = TrainingStrategy::kSingle,
                            .optimizer = optimizer,
                            .grad_dtype = grad_dtype})
        .rank;
  };
  CHECK(bytes({}).parameters == 64 + 64 + 64 + 64);
  CHECK(bytes({}).gradients == 64 + 64 + 64 + 64);
  CHECK(bytes({}, at::kFloat).gradients == 4 * (16 + 32 + 8 + 8));
  CHECK(bytes(optimizer_state("adamw")).optimizer == 2 * (64 + 128 + 64 + 64));
  CHECK(bytes(optimizer_state("sgd_momentum")).optimizer == 64 + 128 + 64 + 64);
  CHECK(bytes(optimizer_state("sgd")).optimizer == 0);
  CHECK(bytes({.bytes = 6}).optimizer == 6 * (16 + 32 + 8 + 8));
  SECTION("what is frozen is a parameter only") {
    for (ParameterInfo& info : model) info.requires_grad = false;
    CHECK(bytes({}) == MemoryBytes{.parameters = 256});
    CHECK(bytes({.bytes = 6}) == MemoryBytes{.parameters = 256});
  }
}

TEST_CASE("activations and the module's buffers are each rank's") {
  const std::vector<ParameterInfo> model = {parameter({16})};
  const MemoryEstimate found = estimate_memory({.parameters = model,
                                                .strategy = TrainingStrategy::kDp,
                                                .world = 3,
                                                .ranks_per_host = 3,
                                                .activation_bytes = 100,
                                                .module_buffer_bytes = 10});
  CHECK(found.rank.activations == 100);
  CHECK(found.host.activations == 300);
  CHECK(found.rank.buffers == 10);
  CHECK(found.host.buffers == 30);
  CHECK(found.rank.total() == found.rank.model_states() + 110);
}

TEST_CASE("rings of ranks that share memory, buckets of ranks that do not") {
  const std::vector<ParameterInfo> model = {parameter({64, 1024 * 1024})};
  const auto buffers = [&](std::string_view strategy, int64_t world, int64_t ranks_per_host) {
    return estimate(model, strategy, world, ranks_per_host).rank.buffers;
  };
  const int64_t slots = 4 * kMiB + 16 * 1024;
  CHECK(buffers("single", 1, 1) == 0);
  CHECK(buffers("ddp", 2, 2) == slots + kDepositRing);
  CHECK(buffers("zero1", 2, 2) == slots + kDepositRing);
  CHECK(buffers("zero2", 2, 2) == slots + kDepositRing);
  CHECK(buffers("fsdp", 2, 2) == slots + kDepositRing);
  SECTION("of many ranks only shards are deposited") {
    CHECK(buffers("ddp", 8, 8) < 2 * kMiB);
    CHECK(buffers("zero2", 8, 8) == buffers("ddp", 8, 8) + kDepositRing);
  }
  SECTION("several hosts") {
    CHECK(buffers("ddp", 4, 1) == 0);
    CHECK(buffers("ddp", 4, 2) == slots);
    CHECK(buffers("fsdp", 4, 2) == slots + 75 * kMiB);
    CHECK(buffers("zero2", 4, 1) == (75 + 50) * kMiB);
  }
}

TEST_CASE("rings of slots have the length that a host group gives them") {
  const std::vector<ParameterInfo> model = {parameter({1})};
  for (const int64_t world : {2, 4, 7}) {
    std::vector<int64_t> bytes(static_cast<size_t>(world));
    shm::test::run_shm_ranks({world}, [&](shm::test::ShmRank& self) {
      bytes[static_cast<size_t>(self.rank)] = self.group.ring_bytes();
    });
    const int64_t expected =
        estimate(model, "zero2", world).rank.buffers - kDepositRing - 16 * 1024;
    CHECK(bytes == std::vector<int64_t>(static_cast<size_t>(world), expected));
  }
}

TEST_CASE("how many ranks a memory takes") {
  const std::vector<ParameterInfo> model = {parameter({7'000'000, 1'000})};
  const auto fewest = [&](std::string_view strategy, int64_t ranks, int64_t gib,
                          bool of_rank = false) {
    const MemoryRequest request{.parameters = model,
                                .strategy = training_strategy(strategy),
                                .world = ranks,
                                .ranks_per_host = of_rank ? 1 : ranks,
                                .host_params = !of_rank,
                                .unit_numel = 100'000'000};
    return fewest_ranks(request, {gib << 30, of_rank});
  };
  CHECK(fewest("ddp", 4, 418) == 4);
  CHECK_FALSE(fewest("ddp", 4, 417));  // each rank keeps all
  CHECK(fewest("zero2", 4, 105) == 4);
  CHECK(fewest("fsdp", 4, 64) == 12);
  CHECK(fewest("fsdp", 8, 24, true) == 8);
  const int64_t ranks = fewest("fsdp", 8, 12, true).value_or(0);
  CHECK(ranks > 8);
  for (const int64_t world : {ranks - 1, ranks}) {
    const MemoryEstimate found = estimate_memory({.parameters = model,
                                                  .strategy = TrainingStrategy::kFsdp,
                                                  .world = world,
                                                  .ranks_per_host = 1,
                                                  .host_params = false,
                                                  .unit_numel = 100'000'000});
    CHECK(fits(found, {int64_t{12} << 30, true}) == (world == ranks));
  }
  CHECK_THROWS_WITH(fewest("ddp", 1, -1), Catch::Contains("got a memory of -"));
}

TEST_CASE("requests that contradict themselves are refused") {
  const std::vector<ParameterInfo> model = {parameter({16})};
  const std::vector<ParameterInfo> vast = {parameter({int64_t{1} << 60})};
  CHECK_THROWS_WITH(training_strategy("zero4"),
                    Catch::Contains("[memory_estimate] got strategy 'zero4', expected one of "
                                    "single, dp, ddp, zero1, zero2, fsdp. Give one"));
  CHECK_THROWS_WITH(memory_accounting(""), Catch::Contains("expected one of trireme, paper"));
  CHECK_THROWS_AS(optimizer_state("muon"), c10::ValueError);
  CHECK_THROWS_WITH(estimate(model, "ddp", -1), Catch::Contains("got a world of -1"));
  CHECK_THROWS_WITH(estimate(model, "ddp", 2, 3), Catch::Contains("got 3 ranks per host"));
  CHECK_THROWS_WITH(estimate(model, "single", 2), Catch::Contains("expected 1 for 'single'"));
  CHECK_THROWS_WITH(estimate(model, "dp", 4, 2), Catch::Contains("choose 'ddp'"));
  CHECK_THROWS_WITH(estimate(vast, "ddp", 2), Catch::Contains("more bytes than 64 bits count"));
  CHECK_THROWS_WITH(estimate_memory({.parameters = model, .activation_bytes = -1}),
                    Catch::Contains("negative number of bytes"));
  CHECK_THROWS_WITH(estimate_memory({.parameters = model, .unit_numel = -1}),
                    Catch::Contains("Look at activation_bytes, unit_numel"));
  CHECK_THROWS_WITH(estimate_memory({.parameters = model,
                                     .accounting = MemoryAccounting::kPaper,
                                     .optimizer = optimizer_state("sgd")}),
                    Catch::Contains("for the paper's accounting"));
}

}  // namespace trireme::memory_estimate_test
