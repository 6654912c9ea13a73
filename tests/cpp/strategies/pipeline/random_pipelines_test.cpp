#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <torch/nn.h>

#include <algorithm>
#include <array>
#include <catch_torch.h>
#include <mutex>
#include <random>
#include <string>
#include <thread_ranks.h>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::random_pipelines_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Tensors = std::vector<at::Tensor>;

// Draws a pipeline: its form and, for each stage, what it takes and returns.
struct Drawn {
  struct StageShape {
    int64_t width_in = 1;
    int64_t width_out = 1;
    int64_t outputs = 1;  // tensors beside the counter that crosses with them
    bool is_frozen = false;
    bool detaches = false;  // the last of its outputs has no graph
    bool works_in_place = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::string name;
  int64_t ranks = 1;
  int64_t micro_batches = 1;
  int64_t seed = 0;
  std::vector<StageShape> shapes;
  std::vector<PipelineSkip> skips;
  std::string checkpoint;

  std::string describe() const {
    return c10::str(name, ", recomputes ", checkpoint, ", ", ranks, " ranks, ", shapes.size(),
                    " stages, ", micro_batches, " micro-batches, ", skips.size(), " skips, seed ",
                    seed);
  }
};

Drawn draw(int64_t seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto number = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  Drawn drawn;
  const std::array<const char*, 8> names{"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs",
                                         "zb-h1", "zb-v", "dualpipe-v",       "zb-auto"};
  drawn.name = names[static_cast<size_t>(number(0, 7))];
  drawn.ranks = number(1, 4);
  drawn.micro_batches = number(1, 6);
  drawn.seed = seed;
  const std::array<const char*, 4> modes{"never", "except_last", "always", "auto"};
  drawn.checkpoint = modes[static_cast<size_t>(number(0, 3))];
  const bool recomputes = drawn.checkpoint != "never";
  const int64_t stages =
      pipeline_schedule(
          {.name = drawn.name, .ranks = drawn.ranks, .micro_batches = drawn.micro_batches})
          .stages;
  int64_t width = number(1, 9);
  const bool freezes_front = number(0, 2) == 0;
  const int64_t frozen = freezes_front ? number(0, stages - 1) : 0;
  const at::ScalarType dtype = number(0, 1) == 0 ? at::kFloat : at::kDouble;
  for (int64_t stage = 0; stage < stages; ++stage) {
    Drawn::StageShape shape;
    shape.width_in = width;
    shape.width_out = width = number(1, 9);
    shape.outputs = number(1, 3);
    shape.is_frozen = stage < frozen || number(0, 7) == 0;
    shape.detaches = shape.outputs > 1 && number(0, 3) == 0;
    shape.works_in_place = !recomputes && stage > 0 && number(0, 2) == 0;
    shape.dtype = dtype;
    drawn.shapes.push_back(shape);
  }
  for (int64_t i = number(0, 4); i > 0; --i) {
    const int64_t from = number(0, stages - 1);
    drawn.skips.push_back({"skip " + std::to_string(i), from, number(from, stages - 1)});
  }
  return drawn;
}

// Takes tensors and a counter of integers, and returns others.
class RandomStage final : public StageFunction {
 public:
  RandomStage(const Drawn& drawn, int64_t index)
      : shape_(drawn.shapes[static_cast<size_t>(index)]), linear_(nullptr) {
    const int64_t seed = drawn.seed * 100 + index;
    for (const PipelineSkip& skip : drawn.skips) {
      if (skip.from == index) stashes_.push_back(skip.name);
      if (skip.to == index) pops_.push_back(skip.name);
    }
    static std::mutex seeding;
    const std::lock_guard<std::mutex> lock(seeding);
    torch::manual_seed(seed);
    linear_ = torch::nn::Linear(shape_.width_in, shape_.width_out * shape_.outputs);
    linear_->to(shape_.dtype);
    for (at::Tensor& parameter : linear_->parameters())
      parameter.set_requires_grad(!shape_.is_frozen);
  }

  PipelineValue forward(int64_t /*micro_batch*/, PipelineValue input) override {
    const at::Tensor counter = input.tensors.back();
    at::Tensor sum;
    for (size_t i = 0; i + 1 < input.tensors.size(); ++i) {
      at::Tensor value = input.tensors[i];
      if (!value.defined()) continue;
      if (shape_.works_in_place) value = value.mul_(0.5);
      sum = sum.defined() ? sum + value : value;
    }
    for (size_t i = 0; i < stashes_.size(); ++i) stash(stashes_[i], value_to_stash(i, input, sum));
    for (const std::string& name : pops_) {
      if (const at::Tensor popped = pop(name); popped.defined())
        sum = sum + popped.to(shape_.dtype).sum(1, /*keepdim=*/true) * 0.1;
    }
    const at::Tensor all = at::tanh(linear_(sum)) * counter.sum();
    PipelineValue output;
    for (const at::Tensor& part : all.chunk(shape_.outputs, 1))
      output.tensors.push_back(part.clone());
    if (shape_.detaches) output.tensors.back() = output.tensors.back().detach();
    output.tensors.push_back(at::Tensor());  // something that is not there
    output.tensors.push_back(counter.remainder(3) + 1);
    output.text = "text";
    return output;
  }
  at::Tensor loss(int64_t /*micro_batch*/, const PipelineValue& output) override {
    at::Tensor sum = at::zeros({}, at::TensorOptions().dtype(shape_.dtype));
    for (const at::Tensor& tensor : output.tensors)
      if (tensor.defined() && tensor.is_floating_point()) sum = sum + tensor.square().mean();
    return sum;
  }

  Tensors parameters() const { return linear_->parameters(); }
  Tensors gradients() const {
    Tensors found;
    for (const at::Tensor& parameter : parameters()) found.push_back(parameter.grad());
    return found;
  }

 private:
  // Returns something computed, an input, something without a graph, or nothing.
  at::Tensor value_to_stash(size_t number, const PipelineValue& input, const at::Tensor& sum) {
    if (number % 4 == 1 && !shape_.works_in_place) return input.tensors.front();
    if (number % 4 == 2) return sum.detach() > 0;
    return number % 4 == 3 ? at::Tensor() : sum * 2;
  }

  Drawn::StageShape shape_;
  torch::nn::Linear linear_;
  std::vector<std::string> stashes_, pops_;
};

std::vector<std::shared_ptr<RandomStage>> stages_of(const Drawn& drawn) {
  std::vector<std::shared_ptr<RandomStage>> stages;
  for (size_t i = 0; i < drawn.shapes.size(); ++i)
    stages.push_back(std::make_shared<RandomStage>(drawn, static_cast<int64_t>(i)));
  return stages;
}

std::vector<PipelineValue> inputs_of(const Drawn& drawn, int64_t step) {
  std::vector<PipelineValue> inputs;
  for (int64_t i = 0; i < drawn.micro_batches; ++i) {
    const int64_t rows = 1 + (i + step) % 4;
    const int64_t width = drawn.shapes.front().width_in;
    at::Tensor values =
        at::sin(at::arange(rows * width, at::kDouble) * double(i + step + 1)).view({rows, width});
    inputs.push_back({{values.to(drawn.shapes.front().dtype), at::arange(1, 3 + i % 2)}});
  }
  return inputs;
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

// Returns losses and gradients of plain accumulation, after two steps.
Tensors train_alone(const Drawn& drawn, Tensors& losses) {
  auto stages = stages_of(drawn);
  for (int64_t step = 0; step < 2; ++step) {
    for (const auto& stage : stages)
      for (const at::Tensor& parameter : stage->parameters()) parameter.mutable_grad().reset();
    Tensors of_step;
    int64_t micro_batch = 0;
    for (PipelineValue value : inputs_of(drawn, step)) {
      for (const auto& stage : stages) value = stage->forward(micro_batch, std::move(value));
      const at::Tensor loss = stages.back()->loss(micro_batch++, value);
      if (loss.requires_grad()) loss.backward();
      of_step.push_back(loss.detach());
    }
    losses.push_back(test::mean_of(of_step));
  }
  Tensors gradients;
  for (const auto& stage : stages)
    for (at::Tensor& gradient : stage->gradients())
      gradients.push_back(gradient.defined() ? gradient.div_(drawn.micro_batches) : gradient);
  return gradients;
}

PipelineSchedule schedule_of(const Drawn& drawn) {
  return with_recomputation(
      pipeline_schedule(
          {.name = drawn.name, .ranks = drawn.ranks, .micro_batches = drawn.micro_batches}),
      recomputation(drawn.checkpoint));
}

// Trains on threads of this process; returns what differs.
// Says whether all is frozen: a step raises then, and has no bits to compare.
bool trains_nothing(const Tensors& gradients) {
  return std::none_of(gradients.begin(), gradients.end(),
                      [](const at::Tensor& gradient) { return gradient.defined(); });
}

std::string compare_threads(const Drawn& drawn) {
  Tensors losses;
  const Tensors gradients = train_alone(drawn, losses);
  if (trains_nothing(gradients)) return "";
  auto stages = stages_of(drawn);
  PipelineThreadsRequest request{.schedule = schedule_of(drawn), .skips = drawn.skips};
  for (size_t i = 0; i < stages.size(); ++i) {
    request.stages.push_back({static_cast<int64_t>(i),
                              "",
                              stages[i],
                              {{"weight", "bias"}, stages[i]->parameters(), {false, false}}});
  }
  const auto rows = static_cast<size_t>(drawn.ranks);
  auto pool = std::make_shared<WorkerPool>(std::vector<c10::Device>(rows, at::kCPU),
                                           std::vector<int>(rows, 1));
  pool->start();
  PipelineThreads threads(std::move(request), pool);
  std::string wrong;
  for (int64_t step = 0; step < 2; ++step) {
    for (const auto& stage : stages)
      for (const at::Tensor& parameter : stage->parameters()) parameter.mutable_grad().reset();
    if (!threads.step(inputs_of(drawn, step), {}).equal(losses[static_cast<size_t>(step)]))
      wrong += " loss";
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    const Tensors own = stages[i]->gradients();
    for (size_t k = 0; k < 2; ++k)
      if (!same_values(own[k], gradients[2 * i + k]))
        wrong += " gradient of stage " + std::to_string(i);
  }
  return wrong;
}

std::string compare(const Drawn& drawn) {
  Tensors losses;
  const Tensors gradients = train_alone(drawn, losses);
  if (trains_nothing(gradients)) return "";
  const PipelineSchedule schedule = schedule_of(drawn);
  std::mutex mutex;
  std::string wrong;
  run_thread_ranks(
      drawn.ranks,
      [&](ThreadRank& rank) {
        auto stages = stages_of(drawn);
        std::vector<PipelineStageRequest> requests;
        for (size_t i = 0; i < stages.size(); ++i) {
          if (schedule.stage_rank[i] != rank.where.rank) continue;
          const Tensors parameters = stages[i]->parameters();
          requests.push_back({static_cast<int64_t>(i),
                              "",
                              stages[i],
                              {{"weight", "bias"}, parameters, {false, false}}});
        }
        PipelineEngine engine(schedule, std::move(requests), rank.communicator,
                              PipelineEngineOptions{.skips = drawn.skips});
        std::string here;
        for (int64_t step = 0; step < 2; ++step) {
          for (const auto& stage : stages)
            for (const at::Tensor& parameter : stage->parameters())
              parameter.mutable_grad().reset();
          if (!engine.step(inputs_of(drawn, step)).equal(losses[static_cast<size_t>(step)]))
            here += " loss";
        }
        for (size_t i = 0; i < stages.size(); ++i) {
          if (schedule.stage_rank[i] != rank.where.rank) continue;
          const Tensors own = stages[i]->gradients();
          for (size_t k = 0; k < 2; ++k)
            if (!same_values(own[k], gradients[2 * i + k]))
              here += " gradient of stage " + std::to_string(i);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        wrong += here;
      },
      std::chrono::seconds(30), Engine::kShm);
  return wrong;
}

TEST_CASE("random pipelines have the bits of plain accumulation") {
  for (int64_t seed = 0; seed < 500; ++seed) {
    const Drawn drawn = draw(seed);
    CAPTURE(drawn.describe());
    CHECK(compare(drawn) == "");
  }
}

TEST_CASE("random pipelines on threads have the bits of plain accumulation") {
  for (int64_t seed = 1000; seed < 1300; ++seed) {
    const Drawn drawn = draw(seed);
    CAPTURE(drawn.describe());
    CHECK(compare_threads(drawn) == "");
  }
}

}  // namespace trireme::random_pipelines_test
