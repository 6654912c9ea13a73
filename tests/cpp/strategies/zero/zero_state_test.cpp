// What a sharded optimizer saves the plain one reads, and the other way round, whatever the number
// of ranks.

#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <catch_torch.h>
#include <sstream>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::zero_state_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

namespace {

std::string archive_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load_from(torch::optim::Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

void set_values(UnevenNet& net, const Values& values) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = net->parameters();
  for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
}

// Steps [begin, end), without the head until step 2: it has no state then.
template <typename Optimizer>
void train_between(UnevenNet& net, Optimizer& optimizer, std::pair<int64_t, int64_t> steps,
                   RankOf where = {0, 1}) {
  for (int64_t step = steps.first; step < steps.second; ++step) {
    optimizer.zero_grad();
    net->forward(part_of_batch(step, where), step >= 2).backward();
    optimizer.step();
  }
}

// A training that was stopped after some steps.
struct Stopped {
  Values parameters;
  std::string optimizer;
};

Stopped stop_alone(int64_t steps) {
  UnevenNet net;
  AdamW optimizer(net->parameters(), AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  train_between(net, optimizer, {0, steps});
  return {values_of(net->parameters()), archive_of(optimizer)};
}

template <typename Inner>
Stopped stop_sharded(int64_t world, Engine engine, int64_t steps) {
  const auto all = on_ranks<Stopped>(world, engine, [&](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<Inner> optimizer(
        net, AdamWOptions(0.01).weight_decay(0.1).amsgrad(true), rank.communicator, {.stage = 2});
    train_between(net, optimizer, {0, steps}, rank.where);
    optimizer.consolidate(world - 1);
    Stopped stopped{values_of(net->parameters()), ""};
    if (rank.where.rank == world - 1) stopped.optimizer = archive_of(optimizer);
    return stopped;
  });
  return all.back();
}

Values go_on_alone(const Stopped& stopped, std::pair<int64_t, int64_t> steps) {
  UnevenNet net;
  set_values(net, stopped.parameters);
  AdamW optimizer(net->parameters(), AdamWOptions(0.5));
  load_from(optimizer, stopped.optimizer);
  train_between(net, optimizer, steps);
  return values_of(net->parameters());
}

template <typename Inner>
std::vector<Values> go_on_sharded(int64_t world, Engine engine, const Stopped& stopped,
                                  std::pair<int64_t, int64_t> steps) {
  return on_ranks<Values>(world, engine, [&](ThreadRank& rank) {
    UnevenNet net;
    set_values(net, stopped.parameters);
    ZeroRedundancyOptimizer<Inner> optimizer(net, AdamWOptions(0.5), rank.communicator,
                                             {.stage = 2});
    load_from(optimizer, stopped.optimizer);
    train_between(net, optimizer, steps, rank.where);
    return values_of(net->parameters());
  });
}

}  // namespace

TEST_CASE("a training goes on from what the plain optimizer saved, and the other way round") {
  for (const int64_t steps : {1, 3}) {
    const Values expected = go_on_alone(stop_alone(steps), {steps, 6});
    for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
      CAPTURE(engine, steps);
      for (const Values& found : go_on_sharded<AdamW>(3, engine, stop_alone(steps), {steps, 6}))
        CHECK(count_unlike(found, expected) == 0);
      CHECK(count_unlike(go_on_alone(stop_sharded<AdamW>(3, engine, steps), {steps, 6}),
                         expected) == 0);
    }
  }
}

TEST_CASE("other numbers of ranks, and our own AdamW") {
  const Values expected = go_on_alone(stop_alone(3), {3, 6});
  const Stopped stopped = stop_sharded<optim::AdamW>(3, Engine::kShm, 3);
  for (const int64_t world : {1, 2}) {
    for (const Values& found : go_on_sharded<AdamW>(world, Engine::kShm, stopped, {3, 6}))
      CHECK(count_unlike(found, expected) == 0);
  }
  CHECK(count_unlike(go_on_alone(stopped, {3, 6}), expected) == 0);
}

TEST_CASE("states come back bit by bit") {
  const Stopped stopped = stop_alone(3);
  const auto archives = on_ranks<std::string>(2, Engine::kShm, [&](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<AdamW> optimizer(net, AdamWOptions(), rank.communicator);
    load_from(optimizer, stopped.optimizer);
    optimizer.consolidate();
    return rank.where.rank == 0 ? archive_of(optimizer) : std::string();
  });
  UnevenNet before, after;
  AdamW first(before->parameters()), second(after->parameters());
  load_from(first, stopped.optimizer);
  load_from(second, archives[0]);
  CHECK(second.state().size() == first.state().size());
  int64_t compared = 0;
  for (size_t i = 0; i < before->parameters().size(); ++i) {
    const auto one = first.state().find(before->parameters()[i].unsafeGetTensorImpl());
    const auto other = second.state().find(after->parameters()[i].unsafeGetTensorImpl());
    REQUIRE((one == first.state().end()) == (other == second.state().end()));
    if (one == first.state().end()) continue;  // frozen
    ++compared;
    const auto& expected = static_cast<torch::optim::AdamWParamState&>(*one->second);
    const auto& found = static_cast<torch::optim::AdamWParamState&>(*other->second);
    CHECK(found.step() == expected.step());
    CHECK(at::equal(found.exp_avg(), expected.exp_avg()));
    CHECK(at::equal(found.exp_avg_sq(), expected.exp_avg_sq()));
    CHECK(at::equal(found.max_exp_avg_sq(), expected.max_exp_avg_sq()));
  }
  CHECK(compared == 7);
  const auto& options =
      static_cast<const AdamWOptions&>(std::as_const(second.param_groups()[0]).options());
  CHECK(options.lr() == 0.01);
  CHECK(options.amsgrad());
}

TEST_CASE("groups keep their options, those that a scheduler has changed, too") {
  std::vector<double> rates(2);
  on_ranks<int>(2, Engine::kShm, [&](ThreadRank& rank) {
    const auto groups_of = [](UnevenNet& net) {
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(net->first->parameters());
      groups.emplace_back(net->second->parameters(), std::make_unique<AdamWOptions>(0.08));
      return groups;
    };
    std::string archive;
    {
      UnevenNet net;
      ZeroRedundancyOptimizer<AdamW> optimizer(groups_of(net), AdamWOptions(0.01),
                                               rank.communicator, {.stage = 2});
      torch::optim::StepLR scheduler(optimizer, 1, 0.5);
      for (int64_t step = 0; step < 2; ++step) {  // torch's first call changes nothing
        train_between(net, optimizer, {step, step + 1}, rank.where);
        scheduler.step();
      }
      optimizer.consolidate(0);
      if (rank.where.rank == 0) archive = archive_of(optimizer);
    }
    if (rank.where.rank != 0) return 0;
    UnevenNet net;
    AdamW plain(groups_of(net), AdamWOptions());
    load_from(plain, archive);
    for (size_t g = 0; g < 2; ++g) rates[g] = plain.param_groups()[g].options().get_lr();
    return 0;
  });
  CHECK(rates == std::vector<double>{0.005, 0.04});
}

TEST_CASE("what cannot be saved or loaded is refused") {
  const auto said = on_ranks<std::vector<std::string>>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<AdamW> optimizer(net, AdamWOptions(), rank.communicator);
    torch::nn::Linear other(2, 2);
    const AdamW of_other(other->parameters());
    const torch::optim::SGD of_sgd(net->parameters(), 0.1);
    // There are as many parameters, the first of another shape.
    Values wider = values_of(net->parameters());
    wider[0] = at::zeros({8, 8});
    for (const at::Tensor& value : wider)
      value.set_requires_grad(true).mutable_grad() = at::zeros_like(value);
    AdamW of_wider(wider);
    of_wider.step();
    return std::vector<std::string>{
        error_of<c10::ValueError>([&] { archive_of(optimizer); }),
        error_of<c10::ValueError>([&] { optimizer.consolidate(2); }),
        error_of<c10::ValueError>([&] { load_from(optimizer, archive_of(of_other)); }),
        error_of<c10::ValueError>([&] { load_from(optimizer, archive_of(of_sgd)); }),
        error_of<c10::ValueError>([&] { load_from(optimizer, archive_of(of_wider)); })};
  });
  for (const std::vector<std::string>& texts : said) {
    CHECK_THAT(texts[0], Catch::Contains("[zero] got save() of a state that was not consolidated"));
    CHECK_THAT(texts[1], Catch::Contains("got rank 2 to consolidate on"));
    CHECK_THAT(texts[2], Catch::Contains("groups of [2] parameters, expected [8]"));
    CHECK_THAT(texts[3], Catch::Contains("another optimizer than this one"));
    CHECK_THAT(texts[4], Catch::Contains("of shape [8, 8] for '") && Catch::Contains("of 2)"));
  }
}

}  // namespace trireme::zero_state_test
