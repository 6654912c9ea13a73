// Ranks with different numbers of inputs, under every strategy, against one process.
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <strategies/fsdp/fsdp_ranks.h>
#include <vector>

using namespace trireme;
using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

constexpr double kMaxNorm = 0.05;  // below all norms
constexpr int64_t kAfter = 2;      // steps of all ranks, after the join

struct Uneven {
  std::vector<int64_t> counts;  // inputs by rank
  bool by_active = false;       // what divides
  bool accumulates = false;     // two backwards per step, the first without synchronization
  Engine engine = Engine::kShm;
};

// What one rank trains with.
struct Trainee {
  torch::optim::Optimizer& optimizer;
  std::function<at::Tensor(const at::Tensor&, bool)> forward;
  std::function<void()> clip, step;
  std::function<std::shared_ptr<void>()> no_sync;
  std::function<void(const std::function<void()>& train, const JoinOptions& options)> join;
};

template <typename Model>
auto no_sync_of(Model& model) {
  return [&model]() -> std::shared_ptr<void> {
    using Guard = decltype(model.no_sync());
    return std::shared_ptr<Guard>(new Guard(model.no_sync()));
  };
}

// A schedule that has no state of its own, so that it goes on where no steps were counted.
void decay(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    group.options().set_lr(group.options().get_lr() * 0.7);
}

// One step over the inputs of rank `where`, but for the optimizer's part.
void backward(const Trainee& trainee, const Uneven& uneven, int64_t step, RankOf where,
              double scale) {
  if (uneven.accumulates) {
    const auto guard = trainee.no_sync();
    (trainee.forward(part_of_batch(step + 10, where), true) * scale).backward();
  }
  (trainee.forward(part_of_batch(step, where), step % 2 == 0) * scale).backward();
}

void run(const Trainee& trainee, const Uneven& uneven, RankOf where) {
  const int64_t steps = *std::max_element(uneven.counts.begin(), uneven.counts.end());
  const auto train = [&](int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      trainee.optimizer.zero_grad();
      backward(trainee, uneven, step, where, 1);
      trainee.clip();
      trainee.step();
      decay(trainee.optimizer);
    }
  };
  JoinOptions options;
  options.divide_by_initial_world_size = !uneven.by_active;
  trainee.join([&] { train(0, uneven.counts.at(static_cast<size_t>(where.rank))); }, options);
  train(steps, steps + kAfter);
}

// One process, whose gradients are those of the ranks that still have inputs.
template <typename Net>
Values train_unevenly_alone(Net net, const Uneven& uneven) {
  AdamW optimizer(net->parameters(), AdamWOptions(0.01));
  const Trainee trainee{optimizer,
                        [&](const auto& x, bool head) { return net->forward(x, head); },
                        {},
                        {},
                        [] { return nullptr; },
                        {}};
  const auto world = static_cast<int64_t>(uneven.counts.size());
  const int64_t steps = *std::max_element(uneven.counts.begin(), uneven.counts.end());
  for (int64_t step = 0; step < steps + kAfter; ++step) {
    const auto trains = [&](int64_t count) { return step < count || step >= steps; };
    const auto active = std::count_if(uneven.counts.begin(), uneven.counts.end(), trains);
    const double scale = 1. / static_cast<double>(uneven.by_active ? active : world);
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < world; ++rank)
      if (trains(uneven.counts[static_cast<size_t>(rank)]))
        backward(trainee, uneven, step, {rank, world}, scale);
    torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm);
    optimizer.step();
    decay(optimizer);
  }
  return values_of(net->parameters());
}

template <typename Inner>
Values train_zero(ThreadRank& rank, const Uneven& uneven, const ZeroOptions& options) {
  UnevenNet net;
  if (options.stage == 2) {
    ZeroRedundancyOptimizer<Inner> optimizer(net, AdamWOptions(0.01), rank.communicator, options);
    run({optimizer, [&](const auto& x, bool head) { return net->forward(x, head); },
         [&] { optimizer.clip_grad_norm_(kMaxNorm); }, [&] { optimizer.step(); },
         no_sync_of(optimizer),
         [&](const auto& train, const auto& join) { optimizer.join(train, join); }},
        uneven, rank.where);
    return values_of(net->parameters());
  }
  DistributedDataParallel<UnevenNet> ddp(net, rank.communicator);
  ZeroRedundancyOptimizer<Inner> optimizer(net, AdamWOptions(0.01), rank.communicator, options);
  // Gradients are whole, so torch's own function is right.
  run({optimizer, [&](const auto& x, bool head) { return ddp->forward(x, head); },
       [&] { torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm); },
       [&] { optimizer.step(); }, no_sync_of(*ddp),
       [&](const auto& train, const auto& join) { trireme::join({ddp, optimizer}, train, join); }},
      uneven, rank.where);
  return values_of(net->parameters());
}

// A unit around another.
template <typename Inside>
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(Inside given)
      : inside(register_module("inside", std::move(given))),
        scale(register_parameter("scale", at::full({6}, 0.5))) {}
  at::Tensor forward(const at::Tensor& x, bool with_head) {
    return inside->forward(x * scale, with_head);
  }
  Inside inside;
  at::Tensor scale;
};

template <typename Optimizer>
Values train_sharded(ThreadRank& rank, const Uneven& uneven, int64_t shard_among = 0) {
  const FsdpOptions options{.communicator = rank.communicator, .shard_among = shard_among};
  UnevenNet net;
  Values wholes = net->parameters();
  auto outer = std::make_shared<OuterImpl<Sharded<UnevenNet>>>(fully_shard(net, options));
  wholes.insert(wholes.begin(), outer->scale);
  auto model = fully_shard(outer, options);
  Optimizer optimizer(model->parameters(), AdamWOptions(0.01));
  run({optimizer, [&](const auto& x, bool head) { return model->forward(x, head); },
       [&] { model->clip_grad_norm_(kMaxNorm); }, [&] { trireme::step(optimizer); },
       no_sync_of(*model),
       [&](const auto& train, const auto& join) { model->join(optimizer, train, join); }},
      uneven, rank.where);
  return whole_values(*model, wholes);
}

const std::vector<Uneven> kCases{{{3, 1}},
                                 {{0, 2, 1}, true},
                                 {{4, 0}, false, true},
                                 {{2, 2}},
                                 {{0, 0}},
                                 {{1, 3}, true, true, Engine::kGloo},
                                 {{2, 0, 3}, false, false, Engine::kGloo}};

std::string text_of(const Uneven& uneven) {
  return c10::str(at::IntArrayRef(uneven.counts), uneven.by_active ? " by active" : "",
                  uneven.accumulates ? " accumulating" : "",
                  uneven.engine == Engine::kGloo ? " over Gloo" : "");
}

// The texts that ranks raise out of `main`.
std::vector<std::string> texts_of(int64_t world, Engine engine,
                                  const std::function<void(ThreadRank&)>& main) {
  return on_ranks<std::string>(world, engine, [&](ThreadRank& rank) -> std::string {
    try {
      main(rank);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "nothing";
  });
}

// Steps a rank's part of batches with ZeRO 2.
struct ZeroLoop {
  explicit ZeroLoop(ThreadRank& rank)
      : where(rank.where),
        optimizer(net, AdamWOptions(0.01), rank.communicator, ZeroOptions{.stage = 2}) {}
  void train(int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      net->forward(part_of_batch(step, where)).backward();
      optimizer.step();
    }
  }
  RankOf where;
  UnevenNet net;
  ZeroRedundancyOptimizer<AdamW> optimizer;
};

}  // namespace

TEST_CASE("ZeRO: ranks with different numbers of inputs train as one process") {
  for (const Uneven& uneven : kCases) {
    const auto world = static_cast<int64_t>(uneven.counts.size());
    const Values expected = train_unevenly_alone(UnevenNet(), uneven);
    for (const int64_t stage : {1, 2}) {
      CAPTURE(text_of(uneven), stage);
      for (const Values& found : on_ranks<Values>(world, uneven.engine, [&](ThreadRank& rank) {
             return train_zero<AdamW>(rank, uneven, {.stage = stage});
           }))
        CHECK(count_unlike(found, expected, 1e-4, 1e-5) == 0);
    }
  }
  const Uneven uneven{{1, 3}};
  for (const Values& found : on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
         return train_zero<optim::AdamW>(rank, uneven, {.stage = 2, .fused_step = true});
       }))
    CHECK(count_unlike(found, train_unevenly_alone(UnevenNet(), uneven), 1e-4, 1e-5) == 0);
}

TEST_CASE("fully_shard: ranks with different numbers of inputs train as one process") {
  const auto alone = [](const Uneven& uneven) {
    return train_unevenly_alone(std::make_shared<OuterImpl<UnevenNet>>(UnevenNet()), uneven);
  };
  for (const Uneven& uneven : kCases) {
    CAPTURE(text_of(uneven));
    const auto world = static_cast<int64_t>(uneven.counts.size());
    for (const Values& found : on_ranks<Values>(world, uneven.engine, [&](ThreadRank& rank) {
           return train_sharded<AdamW>(rank, uneven);
         }))
      CHECK(count_unlike(found, alone(uneven), 1e-4, 1e-5) == 0);
  }
  const Uneven hybrid{{2, 1, 0, 3}, true};
  for (const Values& found : on_shm_ranks<Values>(4, [&](ThreadRank& rank) {
         return train_sharded<optim::AdamW>(rank, hybrid, /*shard_among=*/2);
       }))
    CHECK(count_unlike(found, alone(hybrid), 1e-4, 1e-5) == 0);
}

TEST_CASE("join: several models and optimizers, in any order of calls") {
  const auto train = [](RankOf where, const std::vector<int64_t>& inputs, auto step) {
    for (int64_t i = 0; i < inputs.at(static_cast<size_t>(where.rank)); ++i) {
      step(0, i);
      if (i % 2 == 0) step(1, i);
    }
  };
  const std::vector<int64_t> inputs{3, 1};
  UnevenNet first, second;
  AdamW of_first(first->parameters(), AdamWOptions(0.01));
  AdamW of_second(second->parameters(), AdamWOptions(0.01));
  train({0, 1}, {3}, [&](int64_t which, int64_t i) {
    UnevenNet& net = which == 0 ? first : second;
    AdamW& optimizer = which == 0 ? of_first : of_second;
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < 2; ++rank)
      if (i < inputs[static_cast<size_t>(rank)])
        (net->forward(part_of_batch(i, {rank, 2})) / 2).backward();
    optimizer.step();
  });
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto all = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
      UnevenNet sharded_net;
      const Values wholes = sharded_net->parameters();
      auto sharded = fully_shard(sharded_net, over(rank));
      AdamW of_sharded(sharded->parameters(), AdamWOptions(0.01));
      ZeroLoop zero(rank);
      join({sharded, zero.optimizer},
           [&] {
             train(rank.where, inputs, [&](int64_t which, int64_t i) {
               const at::Tensor x = part_of_batch(i, rank.where);
               if (which == 0) {
                 of_sharded.zero_grad();
                 sharded->forward(x).backward();
                 return void(trireme::step(of_sharded));
               }
               zero.optimizer.zero_grad();
               zero.net->forward(x).backward();
               zero.optimizer.step();
             });
           },
           {.optimizers = {&of_sharded}});
      Values values = whole_values(*sharded, wholes);
      for (const at::Tensor& value : values_of(zero.net->parameters())) values.push_back(value);
      return values;
    });
    Values expected = values_of(first->parameters());
    for (const at::Tensor& value : values_of(second->parameters())) expected.push_back(value);
    for (const Values& found : all) CHECK(count_unlike(found, expected, 1e-4, 1e-5) == 0);
  }
}

TEST_CASE("join: an exception in one rank's loop reaches the others, with or without inputs") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto train = [](ThreadRank& rank, const std::function<void(int64_t)>& steps) {
      steps(rank.where.rank == 0 ? 0 : 2);
      TORCH_CHECK(rank.where.rank != 1, "the loader broke");
      steps(2);
    };
    const auto of_zero = texts_of(3, engine, [&](ThreadRank& rank) {
      ZeroLoop loop(rank);
      loop.optimizer.join([&] {
        if (rank.where.rank != 0) train(rank, [&](int64_t steps) { loop.train(steps); });
      });
    });
    const auto of_sharded = texts_of(3, engine, [&](ThreadRank& rank) {
      auto model = fully_shard(UnevenNet(), over(rank));
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      model->join(optimizer, [&] {
        if (rank.where.rank == 0) return;
        train(rank, [&](int64_t steps) {
          for (int64_t step = 0; step < steps; ++step)
            fsdp_step(model, optimizer, step, rank.where);
        });
      });
    });
    for (const std::string& text : of_zero) CHECK_THAT(text, Catch::Contains("the loader broke"));
    for (const std::string& text : of_sharded)
      CHECK_THAT(text, Catch::Contains("the loader broke"));
  }
}

TEST_CASE("join: what ranks cannot follow is refused by name") {
  const auto of_calls = texts_of(2, Engine::kShm, [](ThreadRank& rank) {
    ZeroLoop loop(rank);
    loop.optimizer.join([&] {
      if (rank.where.rank == 0) loop.train(1);
      loop.optimizer.step();
    });
  });
  for (const std::string& text : of_calls)
    CHECK_THAT(text, Catch::Contains("[join] got a backward of ZeroRedundancyOptimizer on rank 0 "
                                     "and a step of ZeroRedundancyOptimizer on rank 1"));
  const auto of_early = texts_of(2, Engine::kShm, [](ThreadRank& rank) {
    ZeroLoop loop(rank);
    loop.optimizer.join([&] { loop.train(1 + rank.where.rank); },
                        {.throw_on_early_termination = true});
  });
  for (const std::string& text : of_early)
    CHECK_THAT(text, Catch::Contains("rank 0 has none left"));

  using Model = Sharded<UnevenNet>;
  const auto sharded = [](const std::function<void(Model&, AdamW&)>& train, bool with_optimizer) {
    return texts_of(1, Engine::kShm, [&](ThreadRank& rank) {
      auto model = fully_shard(UnevenNet(), over(rank));
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      JoinOptions options;
      if (with_optimizer) options.optimizers = {&optimizer};
      join({model}, [&] { train(model, optimizer); }, options);
    })[0];
  };
  CHECK_THAT(sharded([](Model&, AdamW&) {}, false),
             Catch::Contains("got a join without the optimizer of the model"));
  CHECK_THAT(sharded([](Model& model, AdamW&) { model->unshard(); }, true),
             Catch::Contains("got unshard() in a join"));
}

TEST_CASE("join: disabled, the loop runs as if there was none") {
  const Values expected = train_alone<AdamW>(AdamWOptions(0.01), 3);
  for (const Values& found : on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
         ZeroLoop loop(rank);
         loop.optimizer.join([&] { train(loop.net, loop.optimizer, 3, rank.where); },
                             {.enable = false});
         return values_of(loop.net->parameters());
       }))
    CHECK(count_unlike(found, expected) == 0);
}
