// The gate of ZeRO's step: writes inside and outside, ranks that fail, what is refused.

#include <torch/nn/utils.h>
#include <torch/serialize.h>

#include <algorithm>
#include <catch_torch.h>
#include <memory>
#include <numeric>
#include <sstream>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::zero_gate_test {

using namespace trireme::test;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Texts = std::vector<std::string>;

namespace {

constexpr Engine kGateEngines[] = {Engine::kGloo, Engine::kShm};

void fill(const at::Tensor& parameter, double value) {
  const at::NoGradGuard no_grad;
  parameter.fill_(value);
}

template <typename Optimizer>
void train_step(UnevenNet& net, Optimizer& optimizer, RankOf where) {
  optimizer.zero_grad();
  net->forward(part_of_batch(0, where)).backward();
  optimizer.step();
}

// torch's, but for what it throws on one rank.
class Stumbling : public SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    TORCH_CHECK(!stumbles, "stumbled over a stone");
    return SGD::step(std::move(closure));
  }
  bool stumbles = false;
};

// torch's, but for what it does with nothing to do.
class Idle : public SGD {
 public:
  Idle(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
      : SGD(groups, defaults) {
    TORCH_CHECK(!groups[0].params().empty(), "there is nothing to do");
  }
};

}  // namespace

TEST_CASE("a write outside raises on all ranks, once") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
      train_step(net, optimizer, rank.where);
      if (rank.where.rank == 1) fill(net->gain, 2);
      return Texts{error_of([&] { train_step(net, optimizer, rank.where); }),
                   error_of([&] { train_step(net, optimizer, rank.where); })};
    });
    for (const Texts& texts : said) {
      CHECK_THAT(texts[0], Catch::Contains("[zero] parameter 'gain' was changed outside step()"));
      CHECK_THAT(texts[0], Catch::Contains("`auto writing = optimizer.writing();`"));
      CHECK(texts[1] == "no error");
    }
  }
}

TEST_CASE("a write through .data raises on all ranks, once, also before the first step") {
  for (const Engine engine : kGateEngines) {
    for (const int64_t stage : {1, 2}) {
      CAPTURE(engine, stage);
      const auto said = on_ranks<Texts>(2, engine, [&](ThreadRank& rank) {
        UnevenNet net;
        ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator,
                                               {.stage = stage});
        const auto say = [&] { return error_of([&] { train_step(net, optimizer, rank.where); }); };
        Texts texts;
        for (int64_t time = 0; time < 3; ++time) {
          // All ranks, the one that owns the scalar, and the other one.
          if (time == 0 || time - 1 == rank.where.rank) net->gain.data().mul_(2);
          texts.push_back(say());
          texts.push_back(say());
        }
        if (rank.where.rank == 1) net->second->weight.data().mul_(2);
        texts.push_back(error_of([&] { const auto writing = optimizer.writing(); }));
        return texts;
      });
      for (const Texts& texts : said) {
        for (const size_t time : {0, 2, 4}) {
          CHECK_THAT(texts[time], Catch::Contains("[zero] parameter 'gain' was changed outside"));
          CHECK(texts[time + 1] == "no error");
        }
        CHECK_THAT(texts[6],
                   Catch::Contains("[zero] parameter 'second.weight' was changed outside"));
      }
    }
  }
}

TEST_CASE("a step that was abandoned half way is no write through .data; private ranks go free") {
  const auto said = on_ranks<Texts>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<Stumbling> optimizer(net, SGDOptions(0.1), rank.communicator,
                                                 {.stage = 2});
    Texts texts;
    for (int64_t step = 0; step < 6; ++step) {
      static_cast<Stumbling&>(optimizer.local()).stumbles = step % 2 == 1 && rank.where.rank == 1;
      texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
    }
    return texts;
  });
  for (const Texts& texts : said)
    for (const size_t step : {0, 2, 4}) CHECK(texts[step] == "no error");
  const auto alone = on_ranks<Texts>(1, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
    net->gain.data().mul_(2);
    return Texts{error_of([&] { train_step(net, optimizer, rank.where); })};
  });
  CHECK(alone[0][0] == "no error");
}

TEST_CASE("inside writing() all ranks write, and load, the same") {
  for (const Engine engine : kGateEngines) {
    CAPTURE(engine);
    UnevenNet source;
    fill(source->second->weight, 3);
    std::ostringstream saved;
    torch::save(source, saved);
    const auto unlike = on_ranks<std::vector<int64_t>>(2, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
      train_step(net, optimizer, rank.where);
      {
        const auto writing = optimizer.writing();
        std::istringstream stream(saved.str());
        torch::load(net, stream);
        fill(net->gain, 5);
      }
      std::vector<at::Tensor> expected = values_of(source->parameters());
      // The parameters of the module itself come first.
      expected[0].fill_(5);
      std::vector<int64_t> counts{count_unlike(net->parameters(), expected, 0)};
      train_step(net, optimizer, rank.where);  // the gate knows
      counts.push_back(count_unlike({net->frozen}, {source->frozen}, 0));
      return counts;
    });
    for (const auto& counts : unlike) CHECK(counts == std::vector<int64_t>{0, 0});
  }
}

TEST_CASE("an exception inside writing() is told to the others, and the next step works") {
  const auto said = on_ranks<Texts>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
    Texts texts{error_of([&] {
      const auto writing = optimizer.writing();
      TORCH_CHECK(rank.where.rank == 0, "the file is not there");
    })};
    texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
    return texts;
  });
  CHECK_THAT(said[0][0], Catch::Contains("an exception left writing()"));
  CHECK(said[1][0] == "the file is not there");
  for (const Texts& texts : said) CHECK(texts[1] == "no error");
}

TEST_CASE("one that is made over all parameters of another takes over; of some it is refused") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      const auto make = [&](const auto& of) {
        return std::make_unique<ZeroRedundancyOptimizer<SGD>>(of, SGDOptions(0.1),
                                                              rank.communicator, ZeroOptions{2});
      };
      auto first = make(net);
      train_step(net, *first, rank.where);
      Texts texts{error_of([&] { make(net->first); })};
      train_step(net, *first, rank.where);  // it goes on like before
      auto second = make(net);
      texts.push_back(error_of([&] { train_step(net, *first, rank.where); }));
      texts.push_back(error_of([&] { first->clip_grad_norm_(1); }));
      texts.push_back(error_of([&] { const auto writing = first->writing(); }));
      first.reset();  // takes nothing from the second one
      texts.push_back(error_of([&] { make(net->first); }));
      train_step(net, *second, rank.where);
      second = make(net);
      train_step(net, *second, rank.where);
      UnevenNet alone;
      SGD plain(alone->parameters(), SGDOptions(0.1));
      for (int step = 0; step < 4; ++step) train_step(alone, plain, {0, 1});
      texts.push_back(std::to_string(count_unlike(net->parameters(), alone->parameters())));
      return texts;
    });
    for (const Texts& texts : said) {
      for (const size_t refused : {0, 4}) {
        CHECK_THAT(texts[refused], Catch::Contains("[zero] got 'weight', which another "
                                                   "ZeroRedundancyOptimizer holds, without its 6 "
                                                   "other parameters"));
      }
      for (const size_t retired : {1, 2, 3})
        CHECK_THAT(texts[retired], Catch::Contains("has taken over"));
      CHECK(texts[5] == "0");
    }
  }
}

TEST_CASE("parameters with memory of their own are taken in if all ranks hold the same") {
  const auto said = on_ranks<Texts>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
    Zero& core = *optimizer.cores().all().front();
    std::vector<int64_t> all(net->parameters().size());
    std::iota(all.begin(), all.end(), 0);
    core.give_own_memory(all);
    for (const at::Tensor& parameter : net->parameters()) fill(parameter, 0.5);
    // A bit of the last element of what needs no whole number of words.
    net->first->weight.data_ptr<float>()[77] += static_cast<float>(rank.where.rank) * 1e-7F;
    Texts texts{error_of([&] { train_step(net, optimizer, rank.where); })};
    fill(net->first->weight, 0.5);
    texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
    texts.push_back(std::to_string((net->frozen == 0.5).all().item<bool>()));
    return texts;
  });
  for (const Texts& texts : said) {
    CHECK_THAT(texts[0], Catch::Contains("parameter 'first.weight' was given other data on all"));
    CHECK(texts[1] == "no error");
    CHECK(texts[2] == "1");
  }
}

TEST_CASE("an optimizer that throws on one rank does so on all, and the next step works") {
  const auto said = on_ranks<Texts>(3, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<Stumbling> optimizer(net, SGDOptions(0.1), rank.communicator,
                                                 {.stage = 2});
    auto& local = static_cast<Stumbling&>(optimizer.local());
    Texts texts;
    for (const bool stumbles : {false, true, false}) {
      local.stumbles = stumbles && rank.where.rank == 1;
      texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
    }
    return texts;
  });
  for (const Texts& texts : said) {
    CHECK(texts[0] == "no error");
    CHECK_THAT(texts[1], Catch::Contains("stumbled over a stone"));
    CHECK(texts[2] == "no error");
  }
  CHECK_THAT(said[0][1], Catch::Contains("[zero] step 1 was abandoned (rank 1 of 3)"));
}

TEST_CASE("an optimizer that one rank cannot make none has, and nothing is left of it") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      torch::nn::Linear layer(torch::nn::LinearOptions(3, 3).bias(false));  // rank 0's
      const auto make = [&] {
        return error_of(
            [&] { ZeroRedundancyOptimizer<Idle>(layer, SGDOptions(0.1), rank.communicator); });
      };
      Texts texts{make(), make()};
      fill(layer->weight, static_cast<double>(rank.where.rank));
      rank.communicator->barrier("written").wait();
      texts.push_back(std::to_string(layer->weight.sum().item<int>()));
      return texts;
    });
    for (const size_t again : {0, 1}) {
      CHECK(said[1][again] == "there is nothing to do");
      CHECK_THAT(said[0][again], Catch::Contains("[zero] got an optimizer that rank 1 cannot use: "
                                                 "there is nothing to do (rank 0 of 2)"));
    }
    CHECK(said[0][2] == "0");
    CHECK(said[1][2] == "9");
  }
}

TEST_CASE("a group of some of another one's parameters leaves both as they were") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      const auto make = [&](const auto& layer) {
        return std::make_unique<ZeroRedundancyOptimizer<SGD>>(layer, SGDOptions(0.1),
                                                              rank.communicator, ZeroOptions{2});
      };
      const auto first = make(net->first), second = make(net->second);
      const auto step_both = [&] {
        net->forward(part_of_batch(0, rank.where)).backward();
        first->step();
        second->step();
      };
      Texts texts{error_of(
          [&] { second->add_param_group(OptimizerParamGroup({net->first->bias, net->gain})); })};
      texts.push_back(error_of(step_both));
      second->add_param_group(OptimizerParamGroup(net->first->parameters()));
      texts.push_back(error_of([&] { train_step(net, *second, rank.where); }));
      texts.push_back(error_of(step_both));
      return texts;
    });
    for (const Texts& texts : said) {
      CHECK_THAT(texts[0], Catch::Contains("[zero] got 'param_groups()[1].params()[0]', which "
                                           "another ZeroRedundancyOptimizer holds, without its 1 "
                                           "other parameters"));
      CHECK(texts[1] == "no error");
      CHECK(texts[2] == "no error");
      CHECK_THAT(texts[3], Catch::Contains("has taken over"));
    }
  }
}

TEST_CASE("a closure that throws on one rank does so on all, and the next step works") {
  const auto said = on_ranks<Texts>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
    Texts texts{error_of([&] {
      optimizer.step([&] {
        TORCH_CHECK(rank.where.rank == 0, "no more batches");
        const at::Tensor loss = net->forward(part_of_batch(0, rank.where));
        loss.backward();
        return loss;
      });
    })};
    texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
    return texts;
  });
  for (const Texts& texts : said) {
    CHECK_THAT(texts[0], Catch::Contains("no more batches"));
    CHECK(texts[1] == "no error");
  }
}

TEST_CASE("stage 2: a gradient that was scaled by hand raises on all ranks") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
      net->forward(part_of_batch(0, rank.where)).backward();
      if (rank.where.rank == 0) net->first->bias.mutable_grad().mul_(0.5);
      Texts texts{error_of([&] { optimizer.step(); })};
      texts.push_back(error_of([&] { train_step(net, optimizer, rank.where); }));
      return texts;
    });
    for (const Texts& texts : said) {
      CHECK_THAT(texts[0],
                 Catch::Contains("[zero] the gradient of 'first.bias' is not the average"));
      CHECK(texts[1] == "no error");
    }
  }
}

TEST_CASE("stage 2: torch's clip_grad_norm_, by a norm of each rank's own, raises on all ranks") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<Texts>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator, {.stage = 2});
      const auto step_after = [&](const std::function<void()>& change) {
        optimizer.zero_grad();
        net->forward(part_of_batch(0, rank.where)).backward();
        change();
        return error_of([&] { optimizer.step(); });
      };
      const auto by_element = [&] { torch::nn::utils::clip_grad_value_(net->parameters(), 1e-3); };
      const auto alike = [&] {
        for (const at::Tensor& parameter : net->parameters())
          if (parameter.grad().defined()) parameter.grad().data().mul_(0.25);
      };
      return Texts{step_after([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01); }),
                   step_after([&] { optimizer.clip_grad_norm_(0.01); }), step_after(by_element),
                   step_after(alike), step_after([] {})};
    });
    for (const Texts& texts : said) {
      CHECK_THAT(texts[0],
                 Catch::Contains("[zero] gradients were multiplied by factors that differ"));
      CHECK_THAT(texts[0], Catch::Contains("optimizer.clip_grad_norm_(max_norm)"));
      for (const size_t passes : {1, 2, 3, 4}) CHECK(texts[passes] == "no error");
    }
  }
}

TEST_CASE("a parameter belongs to one optimizer, until that is gone") {
  const auto said = on_ranks<Texts>(1, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    const auto make = [&](ZeroParameters parameters) {
      return error_of<c10::ValueError>([&] {
        ZeroRedundancyOptimizer<SGD>(std::move(parameters), SGDOptions(0.1), rank.communicator);
      });
    };
    Texts texts;
    {
      ZeroRedundancyOptimizer<SGD> first(net->head->parameters(), SGDOptions(0.1),
                                         rank.communicator);
      texts.push_back(make(std::vector<at::Tensor>{net->head->weight}));
      texts.push_back(error_of([&] {
        first.add_param_group(OptimizerParamGroup(net->first->parameters()));
        net->forward(whole_batch(0)).backward();
        first.step();
      }));
    }
    texts.push_back(make(std::vector<at::Tensor>{net->head->weight}));
    return texts;
  });
  CHECK_THAT(said[0][0], Catch::Contains("which another ZeroRedundancyOptimizer holds, without"));
  CHECK(said[0][1] == "no error");
  CHECK(said[0][2] == "no error");
}

TEST_CASE("what cannot be honoured is refused") {
  const auto said = on_ranks<Texts>(1, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    const auto make = [&](const ZeroOptions& options) {
      return error_of<c10::ValueError>(
          [&] { ZeroRedundancyOptimizer<SGD>(net, SGDOptions(0.1), rank.communicator, options); });
    };
    Texts texts{make({.stage = 0}), make({.stage = 3})};
    ZeroRedundancyOptimizer<SGD> optimizer(net->first->parameters(), SGDOptions(0.1),
                                           rank.communicator);
    texts.push_back(error_of<c10::ValueError>([&] { const auto guard = optimizer.no_sync(); }));
    texts.push_back(error_of<c10::ValueError>([&] { optimizer.last_step(); }));
    static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(
        OptimizerParamGroup(net->head->parameters()));
    texts.push_back(error_of<c10::ValueError>([&] { optimizer.step(); }));
    return texts;
  });
  const Texts& texts = said[0];
  CHECK_THAT(texts[0], Catch::Contains("[zero] got stage 0, expected 1 or 2"));
  CHECK_THAT(texts[1], Catch::Contains("use fully_shard"));
  CHECK_THAT(texts[2], Catch::Contains("[zero] got no_sync() under stage 1"));
  CHECK_THAT(texts[3], Catch::Contains("[zero] got last_step() under stage 1"));
  CHECK_THAT(texts[4], Catch::Contains("added through torch::optim::Optimizer"));
}

TEST_CASE("options that differ between the ranks are refused on all") {
  for (const Engine engine : kGateEngines) {
    const auto said = on_ranks<std::string>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      return error_of<c10::ValueError>([&] {
        ZeroRedundancyOptimizer<SGD>(net, SGDOptions(0.1), rank.communicator,
                                     {.stage = 1 + rank.where.rank});
      });
    });
    for (const std::string& text : said)
      CHECK_THAT(text, Catch::Contains("[zero] got options that differ between the ranks"));
  }
}

TEST_CASE("LBFGS and what is no optimizer do not compile") {
  STATIC_REQUIRE(Shardable<SGD>);
  STATIC_REQUIRE(Shardable<Stumbling>);
  STATIC_REQUIRE_FALSE(Shardable<torch::optim::LBFGS>);
  STATIC_REQUIRE_FALSE(Shardable<UnevenNet>);
}

}  // namespace trireme::zero_gate_test
