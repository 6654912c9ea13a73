// ZeroOptions::fused_step: the bits of the same optimizer without it.

#include <catch_torch.h>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::zero_fused_test {

using namespace trireme::test;
using torch::optim::OptimizerParamGroup;

namespace {

// Groups with options of their own; the head comes later.
template <typename Options>
std::vector<OptimizerParamGroup> groups_of(UnevenNet& net, const Options& defaults) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(net->first->parameters());
  Values rest = net->second->parameters();
  rest.push_back(net->gain);
  auto slower = std::make_unique<Options>(defaults);
  slower->lr(defaults.lr() / 4).weight_decay(0.3);
  groups.emplace_back(std::move(rest), std::move(slower));
  return groups;
}

// A net and its optimizer, with or without the fused step.
template <typename Inner, typename Options>
struct Trained {
  Trained(const Options& defaults, ThreadRank& rank, bool fused)
      : where(rank.where),
        optimizer(groups_of(net, defaults), defaults, rank.communicator,
                  {.stage = 2, .fused_step = fused}) {
    optimizer.add_param_group(OptimizerParamGroup(net->head->parameters()));
  }

  void backward(int64_t batch) {
    net->forward(part_of_batch(batch, where), batch % 2 == 0).backward();
  }
  // Whether the backward has left the sums to the step.
  bool is_deferred() {
    for (const at::Tensor& parameter : net->parameters())
      if (parameter.grad().defined()) return false;
    return true;
  }
  void step(int64_t number) {
    optimizer.zero_grad();
    if (number == 4) {
      const auto guard = optimizer.no_sync();
      backward(number + 1);
    }
    backward(number);
    if (number == 6) backward(number + 1);  // makes the sums of the first
    if (number == 8) optimizer.clip_grad_norm_(0.01);
    if (number == 10) {  // forgotten
      optimizer.zero_grad();
      backward(number + 1);
    }
    deferred += is_deferred();
    optimizer.step();
  }

  RankOf where;
  UnevenNet net;
  ZeroRedundancyOptimizer<Inner> optimizer;
  int64_t deferred = 0;
};

template <typename Inner, typename Options>
void check_same_bits(int64_t world, const Options& defaults) {
  struct Seen {
    int64_t unlike = 0;
    std::vector<int64_t> deferred;
  };
  constexpr int64_t kSteps = 14;
  const auto seen = on_ranks<Seen>(world, Engine::kShm, [&](ThreadRank& rank) {
    Trained<Inner, Options> plain(defaults, rank, false);
    Trained<Inner, Options> fused(defaults, rank, true);
    Seen own;
    for (int64_t step = 0; step < kSteps; ++step) {
      plain.step(step);
      fused.step(step);
      const Values expected = plain.net->parameters();
      for (size_t i = 0; i < expected.size(); ++i)
        own.unlike += !at::equal(fused.net->parameters()[i], expected[i]);
    }
    own.deferred = {plain.deferred, fused.deferred};
    return own;
  });
  for (const Seen& result : seen) {
    CHECK(result.unlike == 0);
    // All but the first, which teaches the order, and steps 6 and 8.
    CHECK(result.deferred == std::vector<int64_t>{0, kSteps - 3});
  }
}

std::string refusal_of(const std::function<void(UnevenNet&)>& make) {
  UnevenNet net;
  return error_of<c10::ValueError>([&] { make(net); });
}

}  // namespace

TEST_CASE("the same bits whatever comes between backward and step") {
  for (const int64_t world : {2, 3}) {
    for (const bool amsgrad : {false, true}) {
      CAPTURE(world, amsgrad);
      check_same_bits<optim::AdamW>(world, torch::optim::AdamWOptions(0.01).amsgrad(amsgrad));
    }
  }
  check_same_bits<optim::Adam>(2, torch::optim::AdamOptions(0.01).weight_decay(0.1));
}

TEST_CASE("where ranks share no memory the step is the plain one") {
  const torch::optim::AdamWOptions options(0.01);
  const Values expected = train_alone<torch::optim::AdamW>(options, 6);
  const auto found = on_ranks<Values>(2, Engine::kGloo, [&](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(net, options, rank.communicator,
                                                    {.stage = 2, .fused_step = true});
    train(net, optimizer, 6, rank.where);
    return values_of(net->parameters());
  });
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("only with our own Adam and stage 2") {
  const auto said = on_ranks<std::vector<std::string>>(1, Engine::kShm, [](ThreadRank& rank) {
    const ZeroOptions stage_1{.stage = 1, .fused_step = true};
    const ZeroOptions stage_2{.stage = 2, .fused_step = true};
    return std::vector<std::string>{
        refusal_of([&](UnevenNet& net) {
          ZeroRedundancyOptimizer<optim::AdamW>(net, torch::optim::AdamWOptions(),
                                                rank.communicator, stage_1);
        }),
        refusal_of([&](UnevenNet& net) {
          ZeroRedundancyOptimizer<torch::optim::AdamW>(net, torch::optim::AdamWOptions(),
                                                       rank.communicator, stage_2);
        })};
  });
  CHECK_THAT(said[0][0], Catch::Contains("[zero] got fused_step for stage 1, expected"));
  CHECK_THAT(said[0][1], Catch::Contains("[zero] got fused_step for another optimizer"));
}

}  // namespace trireme::zero_fused_test
