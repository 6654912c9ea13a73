#include <trireme/strategies/pipeline/engine.h>

#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <torch/nn.h>

#include <catch_torch.h>
#include <functional>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <utility>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::pipeline_engine_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kWidth = 6;

// Is a net of blocks that take and return one tensor.
struct Net {
  std::vector<torch::nn::Sequential> stages;

  explicit Net(int64_t count) {
    static std::mutex seeding;  // the generator is one for all threads
    const std::lock_guard<std::mutex> lock(seeding);
    torch::manual_seed(11);
    for (int64_t i = 0; i < count; ++i) {
      stages.emplace_back(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
    }
  }
  Tensors gradients() const {
    Tensors found;
    for (const auto& stage : stages)
      for (const at::Tensor& parameter : stage->parameters()) found.push_back(parameter.grad());
    return found;
  }
};

Tensors batch(int64_t micro_batches) {
  Tensors made;
  for (int64_t i = 0; i < micro_batches; ++i) {
    const int64_t rows = 1 + i % 3;
    made.push_back(at::sin(at::arange(rows * kWidth, at::kDouble) * double(i + 1))
                       .view({rows, kWidth})
                       .to(at::kFloat));
  }
  return made;
}

struct Alone {
  at::Tensor loss;
  Tensors gradients;
};

// Trains in one process: micro-batches in order, divided once.
Alone train_alone(int64_t stages, int64_t micro_batches,
                  const std::function<void(Net&)>& prepare = {}) {
  Net net(stages);
  if (prepare) prepare(net);
  Tensors losses;
  for (at::Tensor value : batch(micro_batches)) {
    for (auto& stage : net.stages) value = stage->forward(value);
    const at::Tensor loss = value.square().mean();
    loss.backward();
    losses.push_back(loss.detach());
  }
  Tensors gradients = net.gradients();
  for (at::Tensor& gradient : gradients)
    if (gradient.defined()) gradient.div_(micro_batches);
  return {test::mean_of(losses), gradients};
}

using Log = std::vector<std::string>;
using Forward = std::function<at::Tensor(int64_t micro_batch, const at::Tensor& input)>;

class OneTensor final : public StageFunction {
 public:
  // With a log it computes weights late, as far as the engine knows.
  explicit OneTensor(Forward forward, Log* log = nullptr)
      : forward_(std::move(forward)), log_(log) {}
  PipelineValue forward(int64_t micro_batch, PipelineValue input) override {
    return {{forward_(micro_batch, input.tensors.at(0))}};
  }
  at::Tensor loss(int64_t /*micro_batch*/, const PipelineValue& output) override {
    return output.tensors.at(0).square().mean();
  }
  bool defers_weights() const override { return log_ != nullptr; }
  void begin_weights(int64_t micro_batch) override {
    log_->push_back("begin " + std::to_string(micro_batch));
  }
  void finish_weights(int64_t micro_batch) override {
    log_->push_back("finish " + std::to_string(micro_batch));
  }

 private:
  Forward forward_;
  Log* log_;
};

std::unique_ptr<PipelineEngine> make_engine(const ThreadRank& rank,
                                            const PipelineSchedule& schedule, Net& net,
                                            const std::function<Forward(int64_t)>& wrap = {},
                                            Log* log = nullptr) {
  std::vector<PipelineStageRequest> requests;
  for (int64_t stage = 0; stage < schedule.stages; ++stage) {
    if (schedule.stage_rank[static_cast<size_t>(stage)] != rank.where.rank) continue;
    auto module = net.stages[static_cast<size_t>(stage)];
    PipelineStageRequest request{stage, "block " + std::to_string(stage)};
    request.function = std::make_shared<OneTensor>(
        wrap ? wrap(stage)
             : Forward([module](int64_t /*micro_batch*/, const at::Tensor& x) mutable {
                 return module->forward(x);
               }),
        log);
    for (const auto& item : module->named_parameters()) {
      request.parameters.names.push_back(item.key());
      request.parameters.tensors.push_back(item.value());
    }
    requests.push_back(std::move(request));
  }
  return std::make_unique<PipelineEngine>(schedule, std::move(requests), rank.communicator,
                                          PipelineEngineOptions());
}

std::vector<PipelineValue> values(const Tensors& tensors) {
  std::vector<PipelineValue> made;
  for (const at::Tensor& tensor : tensors) made.push_back({{tensor}});
  return made;
}

// Puts together what the ranks hold of the gradients of all stages.
class Collected {
 public:
  Collected(int64_t stages, int64_t ranks)
      : gradients_(static_cast<size_t>(2 * stages)), losses_(static_cast<size_t>(ranks)) {}

  void add(const ThreadRank& rank, const PipelineSchedule& schedule, const Net& net,
           const at::Tensor& loss) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensors all = net.gradients();
    for (size_t stage = 0; stage < schedule.stage_rank.size(); ++stage) {
      if (schedule.stage_rank[stage] != rank.where.rank) continue;
      for (const size_t i : {2 * stage, 2 * stage + 1}) gradients_[i] = all[i];
    }
    losses_[static_cast<size_t>(rank.where.rank)] = loss;
  }
  // Says what differs from training alone, or nothing.
  std::string difference(const Alone& alone) const {
    for (const at::Tensor& loss : losses_)
      if (!loss.equal(alone.loss))
        return c10::str("loss ", loss.item<float>(), " for ", alone.loss.item<float>());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const at::Tensor& own = gradients_[i];
      const at::Tensor& theirs = alone.gradients[i];
      if (own.defined() != theirs.defined()) return c10::str("gradient ", i, " is there once");
      if (own.defined() && !own.equal(theirs)) return c10::str("gradient ", i, " differs");
    }
    return "";
  }

 private:
  std::mutex mutex_;
  Tensors gradients_;
  Tensors losses_;
};

std::string train(const PipelineSchedule& schedule, Engine engine,
                  const std::function<void(Net&)>& prepare = {}) {
  const Alone alone = train_alone(schedule.stages, schedule.micro_batches, prepare);
  Collected collected(schedule.stages, schedule.ranks);
  run_thread_ranks(
      schedule.ranks,
      [&](ThreadRank& rank) {
        Net net(schedule.stages);
        if (prepare) prepare(net);
        const auto made = make_engine(rank, schedule, net);
        for (int64_t step = 0; step < 2; ++step) {
          for (auto& stage : net.stages) stage->zero_grad();
          const at::Tensor loss = made->step(values(batch(schedule.micro_batches)));
          const at::Tensor without =
              made->eval_step(values(batch(schedule.micro_batches)), true).loss;
          if (!without.equal(loss)) throw std::runtime_error("evaluation has another loss");
          collected.add(rank, schedule, net, loss);
        }
      },
      std::chrono::seconds(30), engine);
  return collected.difference(alone);
}

TEST_CASE("a pipeline has the bits of its micro-batches in one process") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                             "dualpipe-v", "zb-auto"}) {
      for (const int64_t ranks : {1, 2, 3}) {
        for (const int64_t micro_batches : {1, 4, 5}) {
          CAPTURE(int(engine), name, ranks, micro_batches);
          const PipelineSchedule schedule =
              pipeline_schedule({.name = name, .ranks = ranks, .micro_batches = micro_batches});
          CHECK(train(schedule, engine) == "");
        }
      }
    }
  }
}

TEST_CASE("a table with overlaps runs, and one with messages") {
  const PipelineSchedule overlapped =
      schedule_from_csv("0F0,0F1,0B0,(0F2;0B1)OVERLAP_F_B,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  CHECK(train(overlapped, Engine::kShm) == "");
  const std::string lowered =
      to_csv(pipeline_schedule({.name = "1f1b", .ranks = 2, .micro_batches = 3}),
             TableForm::kComputeComms);
  CHECK(train(schedule_from_csv(lowered), Engine::kShm) == "");
}

TEST_CASE("layers that compute gradients of weights late are told when") {
  const PipelineSchedule schedule =
      pipeline_schedule({.name = "zb-h1", .ranks = 2, .micro_batches = 3});
  const Alone alone = train_alone(2, 3);
  Collected collected(2, 2);
  std::vector<Log> logs(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    Net net(2);
    Log& log = logs[static_cast<size_t>(rank.where.rank)];
    const auto made = make_engine(rank, schedule, net, {}, &log);
    const at::Tensor loss = made->step(values(batch(3)));
    collected.add(rank, schedule, net, loss);
  });
  CHECK(collected.difference(alone) == "");
  for (size_t rank = 0; rank < 2; ++rank) {
    Log expected;
    for (const PipelineAction& action : schedule.rows[rank]) {
      const std::string number = std::to_string(action.micro_batch);
      const bool is_whole = action.kind == ActionKind::kBackward;
      if (is_whole || action.kind == ActionKind::kBackwardInput)
        expected.push_back("begin " + number);
      if (is_whole || action.kind == ActionKind::kBackwardWeight)
        expected.push_back("finish " + number);
    }
    CHECK(logs[rank] == expected);
    CHECK(expected.size() == 6);
  }
}

TEST_CASE("frozen stages send no gradients, and those behind them learn") {
  for (const int64_t frozen : {0, 1, 2}) {
    const auto freeze = [&](Net& net) {
      for (int64_t stage = 0; stage <= frozen; ++stage)
        for (at::Tensor& parameter : net.stages[static_cast<size_t>(stage)]->parameters())
          parameter.set_requires_grad(false);
    };
    const PipelineSchedule schedule =
        pipeline_schedule({.name = "1f1b", .ranks = 4, .micro_batches = 5});
    CHECK(train(schedule, Engine::kShm, freeze) == "");
  }
}

TEST_CASE("a .grad that was there is added to, and stays the same tensor") {
  const PipelineSchedule schedule =
      pipeline_schedule({.name = "1f1b", .ranks = 2, .micro_batches = 4});
  const Alone alone = train_alone(2, 4);
  std::mutex mutex;
  std::vector<bool> is_right;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Net net(2);
        const auto engine = make_engine(rank, schedule, net);
        const at::Tensor weight =
            net.stages[static_cast<size_t>(rank.where.rank)]->parameters().front();
        at::Tensor before = at::ones_like(weight);
        weight.mutable_grad() = before;
        engine->step(values(batch(4)));
        const at::Tensor expected =
            at::ones_like(weight) + alone.gradients[static_cast<size_t>(2 * rank.where.rank)];
        const std::lock_guard<std::mutex> lock(mutex);
        is_right.push_back(weight.grad().is_same(before) && before.equal(expected));
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(is_right == std::vector<bool>{true, true});
}

TEST_CASE("as many micro-batches live as the schedule says") {
  for (const char* name : {"gpipe", "1f1b", "interleaved-1f1b"}) {
    const PipelineSchedule schedule =
        pipeline_schedule({.name = name, .ranks = 3, .micro_batches = 6});
    std::mutex mutex;
    std::vector<int64_t> live(3);
    run_thread_ranks(
        3,
        [&](ThreadRank& rank) {
          Net net(schedule.stages);
          const auto engine = make_engine(rank, schedule, net);
          engine->step(values(batch(6)));
          const std::lock_guard<std::mutex> lock(mutex);
          for (const StageReport& stage : engine->last_step().stages)
            live[static_cast<size_t>(rank.where.rank)] += stage.peak_live;
        },
        std::chrono::seconds(30), Engine::kShm);
    for (int64_t rank = 0; rank < 3; ++rank) {
      CAPTURE(name, rank);
      if (schedule.stages == 3)
        CHECK(live[static_cast<size_t>(rank)] == peak_activations(schedule, rank));
    }
  }
}

TEST_CASE("a first layer may work in place on what it receives") {
  const PipelineSchedule schedule =
      pipeline_schedule({.name = "gpipe", .ranks = 2, .micro_batches = 3});
  std::mutex mutex;
  std::vector<std::string> errors;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Net net(2);
        const auto engine = make_engine(rank, schedule, net, [&](int64_t stage) -> Forward {
          auto module = net.stages[static_cast<size_t>(stage)];
          return [module](int64_t /*micro_batch*/, const at::Tensor& x) mutable {
            at::Tensor y = x.is_leaf() ? x : x.mul_(2).relu_();
            return module->forward(y);
          };
        });
        engine->step(values(batch(3)));
        const std::lock_guard<std::mutex> lock(mutex);
        if (!net.stages[static_cast<size_t>(rank.where.rank)]->parameters()[0].grad().defined())
          errors.push_back("no gradient");
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(errors.empty());
}

TEST_CASE("what a stage throws comes out on all ranks, and the next step works") {
  for (const int64_t culprit : {0, 1, 2}) {
    const PipelineSchedule schedule =
        pipeline_schedule({.name = "1f1b", .ranks = 3, .micro_batches = 4});
    const Alone alone = train_alone(3, 4);
    Collected collected(3, 3);
    std::mutex mutex;
    std::vector<std::string> texts;
    run_thread_ranks(
        3,
        [&](ThreadRank& rank) {
          Net net(3);
          bool throws = true;
          const auto engine = make_engine(rank, schedule, net, [&](int64_t stage) -> Forward {
            auto module = net.stages[static_cast<size_t>(stage)];
            return [module, stage, culprit, &throws](int64_t micro_batch,
                                                     const at::Tensor& x) mutable {
              if (throws && stage == culprit && micro_batch == 2)
                throw std::runtime_error("no such file");
              return module->forward(x);
            };
          });
          std::string text = "nothing";
          try {
            engine->step(values(batch(4)));
          } catch (const std::exception& error) {
            text = error.what();
          }
          throws = false;
          const at::Tensor loss = engine->step(values(batch(4)));
          collected.add(rank, schedule, net, loss);
          const std::lock_guard<std::mutex> lock(mutex);
          texts.push_back(text);
        },
        std::chrono::seconds(30), Engine::kShm);
    for (const std::string& text : texts) {
      CAPTURE(text);
      CHECK(text.find("no such file") != std::string::npos);
      CHECK(text.find("the forward of micro-batch 2 of stage " + std::to_string(culprit)) !=
            std::string::npos);
    }
    CHECK(collected.difference(alone) == "");
  }
}

TEST_CASE("ranks that run different schedules hear of it") {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const char* name = rank.where.rank == 0 ? "gpipe" : "1f1b";
    const PipelineSchedule schedule =
        pipeline_schedule({.name = name, .ranks = 2, .micro_batches = 4});
    Net net(2);
    std::string text = "nothing";
    try {
      make_engine(rank, schedule, net);
    } catch (const c10::ValueError& error) {
      text = error.what_without_backtrace();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    texts.push_back(text);
  });
  for (const std::string& text : texts) CHECK(text.find("on rank 1") != std::string::npos);
}

}  // namespace trireme::pipeline_engine_test
