#include <trireme/activation/checkpoint.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/pipeline_stage.h>
#include <trireme/strategies/pipeline/stage_loss.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <catch_torch.h>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <utility>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::micro_batch_scope_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kChunks = 4;
constexpr double kWeight = 0.25;

std::mutex seed_mutex;

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(44, at::kDouble).view({11, 4}) * double(step + 1)).to(at::kFloat);
}

// Looks at an input and at the target, and has a part of the loss.
struct LooksImpl : torch::nn::Module {
  explicit LooksImpl(size_t number) : number(number) { register_module("linear", linear); }

  at::Tensor forward(const at::Tensor& x) {
    const auto [y, part] = look(x, batch_input(number), batch_target());
    pipeline_loss(part, kWeight);
    return y;
  }
  std::pair<at::Tensor, at::Tensor> look(const at::Tensor& x, const at::Tensor& input,
                                         const at::Tensor& target) {
    const at::Tensor y = linear(at::cat({x, input}, 1)).tanh();
    return {y, target.defined() ? (y - target).square().mean() : y.square().mean()};
  }

  torch::nn::Linear linear{8, 4};
  size_t number;
};
TORCH_MODULE(Looks);

// Has four layers; the third one looks at input `number`.
torch::nn::Sequential seeded_net(size_t number) {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Tanh(), Looks(number),
                               torch::nn::Linear(4, 4));
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

struct Trained {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients = {};
};

// Gives the layer its input and target by hand.
Trained train_alone(size_t number) {
  torch::nn::Sequential net = seeded_net(number);
  const std::vector<Tensors> inputs{rows(0).tensor_split(kChunks), rows(1).tensor_split(kChunks)};
  const Tensors targets = rows(2).tensor_split(kChunks);
  Trained trained;
  for (size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor x = net->at<torch::nn::LinearImpl>(0).forward(inputs[0][i]).tanh();
    const auto [y, part] = net->at<LooksImpl>(2).look(x, inputs[number][i], targets[i]);
    const at::Tensor loss = loss_of(net->at<torch::nn::LinearImpl>(3).forward(y), targets[i]);
    torch::autograd::backward({loss, part}, {at::ones_like(loss), at::full_like(part, kWeight)});
    trained.loss += (loss.item<double>() + kWeight * part.item<double>()) / kChunks;
  }
  for (const auto& item : net->named_parameters())
    trained.gradients[item.key()] = item.value().grad().div_(kChunks);
  return trained;
}

// Collects what is wrong on any rank.
class Wrongs {
 public:
  void add(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(text);
  }
  void compare(const at::Tensor& loss, const torch::nn::Module& model, const Trained& alone,
               const std::function<std::string(const std::string&)>& name_alone) {
    if (std::abs(loss.item<double>() - alone.loss) > 1e-6) add("loss");
    for (const auto& item : model.named_parameters())
      if (!item.value().grad().equal(alone.gradients.at(name_alone(item.key())))) add(item.key());
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

TEST_CASE("a later stage of a Sequential looks at this micro-batch's input and target") {
  const Trained alone = train_alone(0);
  for (const char* schedule : {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1"}) {
    for (const int64_t ranks : {1, 2, 3}) {
      if (ranks == 3 && std::string(schedule) == "interleaved-1f1b") continue;  // for four layers
      Wrongs wrong;
      run_thread_ranks(
          ranks,
          [&](ThreadRank& rank) {
            Pipeline<> pipe(seeded_net(0), rank.communicator,
                            PipelineOptions{.chunks = kChunks, .schedule = schedule});
            const at::Tensor loss = pipe->step(rows(0), rows(2), loss_of);
            wrong.compare(loss, *pipe, alone, [](const std::string& name) { return name; });
            if (!pipe->eval_step(rows(0), rows(2), loss_of).allclose(loss)) wrong.add("evaluation");
            pipe->eval_step(rows(0));  // there is no target then
          },
          std::chrono::seconds(30), Engine::kShm);
      CAPTURE(schedule, ranks, wrong.texts());
      CHECK(wrong.texts().empty());
    }
  }
}

// Is a stage that has some layers of the net, and takes all inputs.
struct PartImpl : torch::nn::Module {
  PartImpl(torch::nn::Sequential net, int64_t begin, int64_t end)
      : net(std::move(net)), begin(begin), end(end) {
    const auto layers = this->net->named_children();
    for (int64_t i = begin; i < end; ++i)
      register_module(layers[static_cast<size_t>(i)].key(), layers[static_cast<size_t>(i)].value());
  }
  at::Tensor forward(const Tensors& given) {
    at::Tensor x = given.at(0);
    for (int64_t i = begin; i < end; ++i) x = (net->begin() + i)->forward(x);
    return x;
  }
  torch::nn::Sequential net;
  int64_t begin, end;
};
TORCH_MODULE(Part);

TEST_CASE("a later stage that its rank has made looks at one of several inputs") {
  const Trained alone = train_alone(1);
  for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0, 2, 4}, {0, 2, 3, 4}}) {
    const auto ranks = static_cast<int64_t>(bounds.size()) - 1;
    Wrongs wrong;
    run_thread_ranks(
        ranks,
        [&](ThreadRank& rank) {
          const auto number = static_cast<size_t>(rank.where.rank);
          const Part part(seeded_net(1), bounds[number], bounds[number + 1]);
          StagePipeline pipe({{part, {.stage = rank.where.rank, .stages = ranks}}},
                             rank.communicator,
                             PipelineOptions{.chunks = kChunks, .schedule = "1f1b"});
          const auto loss_with_input = [&](const at::Tensor& output, const at::Tensor& target) {
            if (batch_input(1).sizes() != output.sizes()) wrong.add("an input for the loss");
            return loss_of(output, target);
          };
          const at::Tensor loss = pipe->step({rows(0), rows(1)}, rows(2), loss_with_input);
          wrong.compare(loss, *pipe, alone,
                        [](const std::string& name) { return name.substr(name.find('.') + 1); });
        },
        std::chrono::seconds(30), Engine::kShm);
    CAPTURE(ranks, wrong.texts());
    CHECK(wrong.texts().empty());
  }
}

struct AsksImpl : torch::nn::Module {
  explicit AsksImpl(std::function<at::Tensor(const at::Tensor&)> asks) : asks(std::move(asks)) {}
  at::Tensor forward(const at::Tensor& x) { return asks(x); }
  std::function<at::Tensor(const at::Tensor&)> asks;
};
TORCH_MODULE(Asks);

// Returns what the step of each rank says, where the second of two stages asks so.
std::vector<std::string> errors_of(const std::function<at::Tensor(const at::Tensor&)>& asks) {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Pipeline<> pipe(torch::nn::Sequential(torch::nn::Linear(4, 4), Asks(asks)),
                        rank.communicator, PipelineOptions{.chunks = 2});
        try {
          pipe->step(rows(0), rows(1), loss_of);
        } catch (const c10::Error& error) {
          texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  return texts;
}

TEST_CASE("what there is not is refused") {
  CHECK_THROWS_AS(batch_input(), c10::ValueError);
  CHECK_THROWS_WITH(batch_target(),
                    Catch::Contains("got a call of batch_target(), expected it in a pipeline's "));
  {
    const MicroBatches batch{{{{rows(0)}}, {{rows(1)}}}, {}};
    const MicroBatchScope outer(batch, 1);
    {
      const MicroBatchScope inner(batch, 0);
      CHECK(batch_input().equal(rows(0)));
    }
    CHECK(batch_input().equal(rows(1)));
    CHECK_FALSE(batch_target().defined());
  }
  CHECK_THROWS_AS(batch_input(), c10::ValueError);

  for (const std::string& text : errors_of([](const at::Tensor& x) { return x * batch_input(1); }))
    CHECK_THAT(text, Catch::Contains("got a call of batch_input() for input 1, expected a number "
                                     "below 1, as many as the step has"));
  const auto again = errors_of([](const at::Tensor& x) {
    return checkpoint([](const at::Tensor& y) { return y.sin() * batch_input(); }, x);
  });
  for (const std::string& text : again)
    CHECK_THAT(text, Catch::Contains("in front of layers that a checkpoint computes again"));
}

}  // namespace trireme::micro_batch_scope_test
