// ZeRO 1 and 2, ranks as threads over both engines: N ranks must train as one process does on the
// whole batch.

#include <torch/optim/schedulers/step_lr.h>

#include <catch_torch.h>
#include <recording_communicator.h>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::zero_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

constexpr Engine kEngines[] = {Engine::kGloo, Engine::kShm};

// What `steps` steps leave on each rank of a world; under stage 1 DDP averages.
template <typename Optimizer, typename Options>
std::vector<Values> train_sharded(int64_t world, Engine engine, const Options& defaults,
                                  const ZeroOptions& options, int64_t steps = 6) {
  return on_ranks<Values>(world, engine, [&](ThreadRank& rank) {
    UnevenNet net;
    std::optional<DistributedDataParallel<UnevenNet>> ddp;
    if (options.stage == 1) ddp.emplace(net, rank.communicator);
    ZeroRedundancyOptimizer<Optimizer> optimizer(net, defaults, rank.communicator, options);
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      const at::Tensor part = part_of_batch(step, rank.where);
      const bool with_head = step % 2 == 0;
      (ddp ? (*ddp)->forward(part, with_head) : net->forward(part, with_head)).backward();
      optimizer.step();
    }
    return values_of(net->parameters());
  });
}

// Each step's backward makes a graph. Returns what is left; says whether stage 1 keeps graphs and
// stage 2 none.
Values train_with_graphs(ThreadRank& rank, int64_t stage) {
  UnevenNet net;
  std::optional<DistributedDataParallel<UnevenNet>> ddp;
  if (stage == 1) ddp.emplace(net, rank.communicator);
  ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = stage});
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const at::Tensor part = part_of_batch(step, rank.where);
    (ddp ? (*ddp)->forward(part, step % 2 == 0) : net->forward(part, step % 2 == 0))
        .backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    TORCH_CHECK(net->first->weight.grad().requires_grad() == (stage == 1));
    optimizer.step();
  }
  return values_of(net->parameters());
}

// Every rank has the parameters of `alone`, and has seen its norms.
void check_like(const UnevenNet& alone, const std::vector<double>& norms,
                const std::vector<Values>& found, const std::vector<std::vector<double>>& seen) {
  for (const Values& values : found)
    CHECK(count_unlike(values, values_of(alone->parameters())) == 0);
  for (const auto& of_rank : seen)
    for (size_t step = 0; step < norms.size(); ++step) CHECK(of_rank[step] == Approx(norms[step]));
}

// Treats a parameter as one thing: divides its gradient by the norm of all of it.
class NormedDescent : public torch::optim::Optimizer {
 public:
  explicit NormedDescent(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
      : Optimizer(groups, std::make_unique<SGDOptions>(defaults)) {}
  explicit NormedDescent(Values parameters, SGDOptions defaults)
      : NormedDescent({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        parameter.sub_(parameter.grad() * (group.options().get_lr() / parameter.grad().norm()));
      }
    }
    return {};
  }
};

}  // namespace

TEST_CASE("backward with create_graph trains as without; stage 1 keeps this rank's graph") {
  const Values expected = train_alone<SGD>(SGDOptions(0.1), 4);
  for (const Engine engine : kEngines) {
    for (const int64_t stage : {1, 2}) {
      CAPTURE(static_cast<int>(engine), stage);
      const auto found = on_ranks<Values>(
          2, engine, [&](ThreadRank& rank) { return train_with_graphs(rank, stage); });
      for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
    }
  }
}

TEST_CASE("ranks train as one process does on the whole batch, stages 1 and 2") {
  const AdamWOptions options = AdamWOptions(0.01).weight_decay(0.1);
  const Values expected = train_alone<AdamW>(options, 6);
  for (const Engine engine : kEngines) {
    for (const int64_t stage : {1, 2}) {
      for (const int64_t world : {1, 2, 3}) {
        CAPTURE(engine, stage, world);
        for (const Values& found : train_sharded<AdamW>(world, engine, options, {.stage = stage}))
          CHECK(count_unlike(found, expected) == 0);
      }
    }
  }
}

TEST_CASE("gradients in a dtype of their own arrive in it, under DDP and ZeRO 2") {
  const SGDOptions options = SGDOptions(0.1).momentum(0.9);
  const Values expected = train_alone<SGD>(options, 4);
  for (const Engine engine : kEngines) {
    for (const int64_t stage : {1, 2}) {
      CAPTURE(engine, stage);
      const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
        UnevenNet net = net_with_gradients_in(at::kDouble);
        std::optional<DistributedDataParallel<UnevenNet>> ddp;
        if (stage == 1) ddp.emplace(net, rank.communicator);
        ZeroRedundancyOptimizer<SGD> optimizer(net, options, rank.communicator, {.stage = stage});
        int64_t doubles = 0;
        for (int64_t step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          const at::Tensor part = part_of_batch(step, rank.where);
          const bool with_head = step % 2 == 0;
          (ddp ? (*ddp)->forward(part, with_head) : net->forward(part, with_head)).backward();
          doubles += count_gradients_in(at::kDouble, net->parameters());
          optimizer.step();
        }
        Values values = values_of(net->parameters());
        values.push_back(at::scalar_tensor(doubles));
        return values;
      });
      for (Values values : found) {
        CHECK(values.back().item<int64_t>() == 7 + 5 + 7 + 5);
        values.pop_back();
        CHECK(count_unlike(values, expected) == 0);
      }
    }
  }
}

TEST_CASE("every optimizer that treats elements alike, ours too") {
  const SGDOptions sgd = SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
  const torch::optim::RMSpropOptions rmsprop(0.01);
  const torch::optim::AdagradOptions adagrad(0.1);
  const AdamWOptions adamw(0.01);
  const auto check = [](const std::vector<Values>& found, const Values& expected) {
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  };
  const ZeroOptions stage_2{.stage = 2};
  constexpr Engine kShm = Engine::kShm;
  check(train_sharded<SGD>(3, kShm, sgd, stage_2), train_alone<SGD>(sgd, 6));
  check(train_sharded<optim::SGD>(3, kShm, sgd, stage_2), train_alone<SGD>(sgd, 6));
  check(train_sharded<optim::AdamW>(3, kShm, adamw, stage_2), train_alone<AdamW>(adamw, 6));
  check(train_sharded<torch::optim::RMSprop>(2, kShm, rmsprop, stage_2),
        train_alone<torch::optim::RMSprop>(rmsprop, 6));
  check(train_sharded<torch::optim::Adagrad>(2, kShm, adagrad, stage_2),
        train_alone<torch::optim::Adagrad>(adagrad, 6));
}

TEST_CASE("an optimizer that is not known gets whole parameters") {
  const SGDOptions options(0.05);
  const Values expected = train_alone<NormedDescent>(options, 6);
  for (const Engine engine : kEngines) {
    for (const Values& found : train_sharded<NormedDescent>(3, engine, options, {.stage = 2})) {
      CHECK(count_unlike(found, expected) == 0);
    }
  }
}

TEST_CASE("flat placement, and parameters that stay private") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 6);
  const ZeroOptions flat{.stage = 2, .placement = ShardPlacement::kFlat};
  for (const Values& found : train_sharded<AdamW>(3, Engine::kShm, options, flat))
    CHECK(count_unlike(found, expected) == 0);
  const ZeroOptions host_private{.stage = 2, .host_params = false};
  for (const Values& found : train_sharded<AdamW>(3, Engine::kShm, options, host_private))
    CHECK(count_unlike(found, expected) == 0);
}

TEST_CASE("ranks of a host have one copy of the parameters, and start from rank 0's") {
  for (const Engine engine : kEngines) {
    const auto seen = on_ranks<double>(2, engine, [](ThreadRank& rank) {
      torch::nn::Linear layer(3, 4);
      {
        const at::NoGradGuard no_grad;
        layer->weight.fill_(static_cast<double>(rank.where.rank + 1));
      }
      ZeroRedundancyOptimizer<SGD> optimizer(layer, SGDOptions(0.1), rank.communicator);
      const double started = layer->weight.sum().item<double>();
      rank.communicator->barrier("started").wait();
      // A write that no version counts, which is how one sees that the memory is the same.
      if (rank.where.rank == 0) layer->weight.mutable_data_ptr<float>()[0] = 50;
      rank.communicator->barrier("written").wait();
      return started * 1000 + layer->weight[0][0].item<double>();
    });
    CHECK(seen[0] == 12050);
    CHECK(seen[1] == (engine == Engine::kShm ? 12050 : 12001));
  }
}

TEST_CASE("stage 2: no_sync accumulates, and the next backward averages what has come together") {
  // Per step: which batches, and whether their backward synchronizes.
  using Backwards = std::vector<std::pair<int64_t, bool>>;
  const std::vector<Backwards> steps{{{0, false}, {1, true}},
                                     {{2, true}, {3, true}},
                                     {{4, true}, {5, false}, {6, true}},
                                     {{7, false}, {8, false}, {9, true}}};
  UnevenNet alone;
  AdamW plain(alone->parameters(), AdamWOptions(0.01));
  for (const Backwards& backwards : steps) {
    plain.zero_grad();
    for (const auto& [batch, synchronizes] : backwards)
      alone->forward(whole_batch(batch)).backward();
    plain.step();
  }
  const Values expected = values_of(alone->parameters());
  for (const Engine engine : kEngines) {
    const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<AdamW> optimizer(net, AdamWOptions(0.01), rank.communicator,
                                               {.stage = 2});
      for (const Backwards& backwards : steps) {
        optimizer.zero_grad();
        for (const auto& [batch, synchronizes] : backwards) {
          std::optional<ZeroOptimizer::NoSync> guard;
          if (!synchronizes) guard.emplace(optimizer);
          net->forward(part_of_batch(batch, rank.where)).backward();
        }
        optimizer.step();
      }
      return values_of(net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("stage 2: gradients have their shape, their average on the owner and zeros elsewhere") {
  UnevenNet alone;
  alone->forward(whole_batch(0)).backward();
  const at::Tensor whole = alone->first->weight.grad();  // 13 rows: 0 .. 6, 7 .. 12
  for (const Engine engine : kEngines) {
    const auto grads = on_ranks<at::Tensor>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<AdamW> optimizer(net, AdamWOptions(), rank.communicator,
                                               {.stage = 2});
      for (int64_t step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        net->forward(part_of_batch(0, rank.where)).backward();
      }
      return net->first->weight.grad().clone();
    });
    CHECK(at::allclose(grads[0] + grads[1], whole, 1e-5, 1e-7));
    CHECK(grads[0].narrow(0, 7, 6).count_nonzero().item<int>() == 0);
    CHECK(grads[1].narrow(0, 0, 7).count_nonzero().item<int>() == 0);
  }
}

TEST_CASE("parameter groups, a scheduler, a group that is added later, a closure") {
  const auto groups_of = [](UnevenNet& net) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(net->first->parameters());
    groups.emplace_back(net->second->parameters(),
                        std::make_unique<AdamWOptions>(AdamWOptions(0.03).weight_decay(0.5)));
    return groups;
  };
  const auto run = [](UnevenNet& net, auto& optimizer, RankOf where) {
    torch::optim::StepLR scheduler(optimizer, 2, 0.5);
    double losses = 0;
    for (int64_t step = 0; step < 6; ++step) {
      if (step == 2) {
        optimizer.add_param_group(OptimizerParamGroup(
            net->head->parameters(), std::make_unique<AdamWOptions>(AdamWOptions(0.02))));
      }
      const at::Tensor loss = optimizer.step([&] {
        net->zero_grad();
        at::Tensor of_batch = net->forward(part_of_batch(step, where));
        of_batch.backward();
        return of_batch;
      });
      losses += loss.template item<double>();
      scheduler.step();
    }
    return losses;
  };
  UnevenNet alone;
  AdamW plain(groups_of(alone), AdamWOptions(0.01));
  const double losses = run(alone, plain, {0, 1});
  const Values expected = values_of(alone->parameters());
  for (const Engine engine : kEngines) {
    std::vector<double> means(2);
    const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<AdamW> optimizer(groups_of(net), AdamWOptions(0.01),
                                               rank.communicator, {.stage = 2});
      means[static_cast<size_t>(rank.where.rank)] = run(net, optimizer, rank.where);
      return values_of(net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
    CHECK((means[0] + means[1]) / 2 == Approx(losses));
  }
}

TEST_CASE("clip_grad_norm_ clips as torch does on one process") {
  UnevenNet alone;
  SGD plain(alone->parameters(), SGDOptions(0.1));
  std::vector<double> norms;
  for (int64_t step = 0; step < 3; ++step) {
    plain.zero_grad();
    alone->forward(whole_batch(step)).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05));
    plain.step();
  }
  for (const Engine engine : kEngines) {
    for (const int64_t stage : {1, 2}) {
      std::vector<std::vector<double>> seen(2);
      const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
        UnevenNet net;
        std::optional<DistributedDataParallel<UnevenNet>> ddp;
        if (stage == 1) ddp.emplace(net, rank.communicator);
        ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator,
                                               {.stage = stage});
        for (int64_t step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          const at::Tensor part = part_of_batch(step, rank.where);
          (ddp ? (*ddp)->forward(part) : net->forward(part)).backward();
          seen[static_cast<size_t>(rank.where.rank)].push_back(
              optimizer.clip_grad_norm_(0.05).item<double>());
          optimizer.step();
        }
        return values_of(net->parameters());
      });
      check_like(alone, norms, found, seen);
    }
  }
}

TEST_CASE("two optimizers of one net, clipped together") {
  const auto matrices_of = [](UnevenNet& net) {
    return Values{net->first->weight, net->second->weight};
  };
  const auto rest_of = [](UnevenNet& net) {
    return Values{net->first->bias, net->second->bias, net->head->weight, net->head->bias,
                  net->gain};
  };
  UnevenNet alone;
  NormedDescent plain(matrices_of(alone), SGDOptions(0.05));
  AdamW plain_rest(rest_of(alone), AdamWOptions(0.01));
  std::vector<double> norms;
  for (int64_t step = 0; step < 4; ++step) {
    alone->zero_grad();
    alone->forward(whole_batch(step), step % 2 == 0).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05));
    plain.step();
    plain_rest.step();
  }
  for (const Engine engine : kEngines) {
    std::vector<std::vector<double>> seen(3);
    const auto found = on_ranks<Values>(3, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<NormedDescent> matrices(matrices_of(net), SGDOptions(0.05),
                                                      rank.communicator, {.stage = 2});
      ZeroRedundancyOptimizer<AdamW> rest(rest_of(net), AdamWOptions(0.01), rank.communicator,
                                          {.stage = 2});
      for (int64_t step = 0; step < 4; ++step) {
        matrices.zero_grad();
        rest.zero_grad();
        net->forward(part_of_batch(step, rank.where), step % 2 == 0).backward();
        std::vector<GradNormPart> parts = matrices.gradients();
        for (GradNormPart& part : rest.gradients()) parts.push_back(std::move(part));
        seen[static_cast<size_t>(rank.where.rank)].push_back(
            clip_grad_norm_(parts, {.max_norm = 0.05}).item<double>());
        matrices.step();
        rest.step();
      }
      return values_of(net->parameters());
    });
    check_like(alone, norms, found, seen);
  }
}

TEST_CASE("what a step of stage 2 sends over Gloo") {
  const auto sent = on_ranks<std::vector<WireRecord>>(2, Engine::kGloo, [](ThreadRank& rank) {
    const auto wire = std::make_shared<RecordingCommunicator>(rank.communicator);
    torch::nn::Linear layer(8, 5);  // 40 + 5 floats; rank 0 has 3 rows of 5
    ZeroRedundancyOptimizer<AdamW> optimizer(layer, AdamWOptions(), wire, {.stage = 2});
    for (int64_t step = 0; step < 3; ++step) {
      if (step == 2) wire->clear();
      optimizer.zero_grad();
      layer->forward(at::ones({2, 8})).sum().backward();
      optimizer.step();
    }
    return wire->records();
  });
  for (const std::vector<WireRecord>& records : sent) {
    REQUIRE(records.size() == 5);
    CHECK(records[0].verb == "reduce_scatter");
    CHECK(records[0].label.ends_with(", bucket 0: bias .. weight"));
    CHECK(records[0].bytes == 2 * (24 + 3) * 4);
    CHECK(records[1].verb == "all_reduce");
    CHECK(records[1].label == "used-map");
    CHECK(records[1].bytes == 3 * 4);
    CHECK(records[2].verb == "all_reduce");
    CHECK(records[2].label == "step gate: before writing");
    CHECK(records[2].bytes <= 128);
    CHECK(records[3].verb == "broadcast");
    CHECK(records[3].label == "parameters of rank 0");
    CHECK(records[3].bytes == (24 + 3) * 4);
    CHECK(records[4].label == "parameters of rank 1");
    CHECK(records[4].bytes == (16 + 2) * 4);
  }
}

}  // namespace trireme::zero_test
