#include <trireme/strategies/pipeline/gradients/replicas.h>

#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/fsdp/fully_shard.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/sync/no_sync.h>

#include <torch/nn.h>

#include <atomic>
#include <catch_torch.h>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::replicas_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kChunks = 4;
constexpr auto kTimeout = std::chrono::seconds(30);

// Sums gradients to whole numbers, so that no order of additions rounds.
torch::nn::Sequential net() {
  torch::nn::Sequential layers;
  for (int64_t i = 0; i < 4; ++i) {
    torch::nn::Linear layer(3, 3);
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(9).view({3, 3}).add(i).remainder(3).sub(1));
    layer->bias.fill_(static_cast<double>(i % 2));
    layers->push_back(layer);
  }
  return layers;
}
at::Tensor rows(int64_t seed) {
  return at::arange(24).view({8, 3}).mul(seed + 2).remainder(5).sub(2).to(at::kFloat);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output * target).sum();
}

// Returns the gradients that one process has: the mean over copies of what each accumulates in
// `steps`, divided by the number of micro-batches.
Tensors expected(int64_t copies, const std::vector<int64_t>& steps) {
  torch::nn::Sequential whole = net();
  for (int64_t copy = 0; copy < copies; ++copy)
    for (const int64_t step : steps)
      loss_of(whole->forward(rows(step * 10 + copy)), rows(step * 10 + copy + 5)).backward();
  Tensors gradients;
  for (const at::Tensor& parameter : whole->parameters())
    gradients.push_back(parameter.grad().div(kChunks * copies));
  return gradients;
}

// Compares this rank's gradients with those of the same layers.
bool has_gradients(const torch::nn::Module& pipe, const Tensors& whole) {
  const auto all = net()->named_parameters();
  for (const auto& parameter : pipe.named_parameters()) {
    const auto keys = all.keys();
    const auto place = std::find(keys.begin(), keys.end(), parameter.key()) - keys.begin();
    if (!parameter.value().grad().defined() ||
        !parameter.value().grad().equal(whole[static_cast<size_t>(place)]))
      return false;
  }
  return true;
}

void step(Pipeline<>& pipe, int64_t number, int64_t copy) {
  pipe->step(rows(number * 10 + copy), rows(number * 10 + copy + 5), loss_of);
}

TEST_CASE("replicas of a pipeline average their gradients") {
  const Tensors whole = expected(2, {1});
  for (const char* schedule :
       {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"}) {
    for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
      std::mutex mutex;
      std::vector<std::string> wrong;
      run_thread_ranks(
          4,
          [&](ThreadRank& rank) {
            torch::nn::Sequential own = net();
            const int64_t copy = rank.where.rank / 2;
            if (copy == 1) {  // begins with the values of the first copy
              const at::NoGradGuard no_grad;
              for (const at::Tensor& parameter : own->parameters()) parameter.zero_();
            }
            Pipeline<> pipe(
                own, rank.communicator,
                PipelineOptions{.chunks = kChunks, .schedule = schedule, .replicas = 2});
            for (int64_t i = 0; i < 3; ++i) {
              pipe->zero_grad();
              step(pipe, 1, copy);
              const std::lock_guard<std::mutex> lock(mutex);
              if (!has_gradients(*pipe, whole)) wrong.push_back("step " + std::to_string(i));
            }
          },
          kTimeout, engine);
      CAPTURE(schedule, engine == Engine::kShm, wrong);
      CHECK(wrong.empty());
    }
  }
}

TEST_CASE("steps without synchronization accumulate in each copy") {
  const Tensors both = expected(2, {1, 2});
  std::atomic<int> right = 0;
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        const int64_t copy = rank.where.rank / 2;
        Pipeline<> pipe(net(), rank.communicator,
                        PipelineOptions{.chunks = kChunks, .schedule = "zb-h1", .replicas = 2});
        {
          const auto guard = pipe->no_sync();
          step(pipe, 1, copy);
        }
        const at::Tensor before = pipe->parameters()[0].grad();
        step(pipe, 2, copy);
        right += has_gradients(*pipe, both) && pipe->parameters()[0].grad().is_same(before) ? 1 : 0;
      },
      kTimeout, Engine::kShm);
  CHECK(right == 4);
}

TEST_CASE("copies must enter no_sync() together") {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Pipeline<> pipe(net(), rank.communicator, PipelineOptions{.chunks = 2, .replicas = 2});
        try {
          const bool stays_out = rank.where.rank == 0;
          if (stays_out) return step(pipe, 1, 0);
          const auto guard = pipe->no_sync();
          step(pipe, 1, 1);
        } catch (const c10::Error& error) {
          const std::lock_guard<std::mutex> lock(mutex);
          texts.emplace_back(error.what_without_backtrace());
        }
      },
      kTimeout, Engine::kShm);
  REQUIRE(texts.size() == 2);
  for (const std::string& text : texts)
    CHECK_THAT(text, Catch::Contains("1 of 2 replicas of the pipeline average"));
}

TEST_CASE("an exception in one copy comes out of all of them, and the next step works") {
  const Tensors whole = expected(2, {1});
  std::mutex mutex;
  std::vector<std::string> texts;
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        const int64_t copy = rank.where.rank / 2;
        Pipeline<> pipe(net(), rank.communicator,
                        PipelineOptions{.chunks = kChunks, .schedule = "1f1b", .replicas = 2});
        step(pipe, 1, copy);
        int64_t calls = 0;
        try {
          pipe->step(rows(copy), rows(copy), [&](const at::Tensor& output, const at::Tensor& y) {
            if (copy == 1 && ++calls == 3) throw std::runtime_error("the third loss");
            return loss_of(output, y);
          });
        } catch (const std::exception& error) {
          const std::lock_guard<std::mutex> lock(mutex);
          texts.emplace_back(error.what());
        }
        TORCH_CHECK(has_gradients(*pipe, whole), "gradients of before");
        pipe->zero_grad();
        step(pipe, 1, copy);
        TORCH_CHECK(has_gradients(*pipe, whole), "gradients of after");
      },
      kTimeout, Engine::kShm);
  REQUIRE(texts.size() == 4);
  for (const std::string& text : texts) CHECK_THAT(text, Catch::Contains("the third loss"));
}

TEST_CASE("replicas that do not divide the ranks are refused") {
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        CHECK_THROWS_WITH(Pipeline<>(net(), rank.communicator, PipelineOptions{.replicas = 2}),
                          Catch::Contains("replicas=2 of a pipeline on 3 ranks"));
      },
      kTimeout, Engine::kShm);
}

// Is a layer of a Sequential, whose forwards must not be templates.
class WrappedImpl : public torch::nn::Module {
 public:
  WrappedImpl(torch::nn::Linear layer, std::shared_ptr<Communicator> communicator)
      : ddp_(register_module("ddp", DistributedDataParallel<torch::nn::Linear>(
                                        std::move(layer), std::move(communicator)))) {}
  at::Tensor forward(const at::Tensor& x) { return ddp_->forward(x); }
  int64_t averaged() { return ddp_->core().reducer().last_step().step; }

 private:
  DistributedDataParallel<torch::nn::Linear> ddp_;
};
TORCH_MODULE(Wrapped);

TEST_CASE("layers in DistributedDataParallel average once per step") {
  const Tensors whole = expected(2, {1});
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    std::mutex mutex;
    std::vector<std::string> wrong;
    run_thread_ranks(
        4,
        [&](ThreadRank& rank) {
          const PipelineRanks ranks =
              ranks_of_replica(rank.communicator, PipelineOptions{.replicas = 2});
          torch::nn::Sequential wrapped;
          std::vector<Wrapped> own;
          torch::nn::Sequential plain = net();
          for (auto& layer : *plain) {
            wrapped->push_back(
                Wrapped(torch::nn::Linear(layer.ptr<torch::nn::LinearImpl>()), ranks.replicas));
            own.push_back(Wrapped(wrapped->ptr<WrappedImpl>(wrapped->size() - 1)));
          }
          Pipeline<> pipe(wrapped, ranks.communicator,
                          PipelineOptions{.chunks = kChunks, .schedule = schedule});
          const auto all = net()->named_parameters();
          for (int64_t i = 1; i <= 3; ++i) {
            pipe->zero_grad();
            step(pipe, 1, rank.where.rank / 2);
            const size_t first = rank.where.rank % 2 == 0 ? 0 : 2;
            const std::lock_guard<std::mutex> lock(mutex);
            for (size_t k = 0; k < 4; ++k)
              if (!pipe->parameters()[k].grad().equal(whole[2 * first + k]))
                wrong.push_back("gradient " + std::to_string(k));
            if (own[first]->averaged() != i) wrong.push_back("averages");
          }
        },
        kTimeout, Engine::kShm);
    CAPTURE(schedule, wrong);
    CHECK(wrong.empty());
  }
}

// Calls a sharded layer in the first micro-batch of a step alone, if it is told to.
class AtFirstImpl : public torch::nn::Module {
 public:
  AtFirstImpl(Sharded<torch::nn::Linear> layer, bool only_first)
      : layer_(register_module("layer", std::move(layer))), only_first_(only_first) {}
  at::Tensor forward(const at::Tensor& x) {
    return calls_++ % kChunks == 0 || !only_first_ ? layer_->forward(x) : x * 1;
  }

 private:
  Sharded<torch::nn::Linear> layer_;
  bool only_first_;
  int64_t calls_ = 0;
};
TORCH_MODULE(AtFirst);

// Returns what expected() does, for one step of such layers. Later micro-batches have no graph.
Tensors expected_of_first(int64_t copies, int64_t number) {
  torch::nn::Sequential whole = net();
  for (int64_t copy = 0; copy < copies; ++copy) {
    const at::Tensor x = rows(number * 10 + copy).tensor_split(kChunks).front();
    const at::Tensor y = rows(number * 10 + copy + 5).tensor_split(kChunks).front();
    loss_of(whole->forward(x), y).backward();
  }
  Tensors gradients;
  for (const at::Tensor& parameter : whole->parameters())
    gradients.push_back(parameter.grad().div(kChunks * copies));
  return gradients;
}

TEST_CASE("layers in fully_shard average once per step, whether the last backward comes to them") {
  for (const bool only_first : {false, true}) {
    const Tensors whole = only_first ? expected_of_first(2, 1) : expected(2, {1});
    for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
      for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
        std::mutex mutex;
        std::vector<std::string> wrong;
        run_thread_ranks(
            4,
            [&](ThreadRank& rank) {
              const PipelineRanks ranks =
                  ranks_of_replica(rank.communicator, PipelineOptions{.replicas = 2});
              torch::nn::Sequential sharded;
              torch::nn::Sequential plain = net();
              for (auto& layer : *plain) {
                torch::nn::Linear linear(layer.ptr<torch::nn::LinearImpl>());
                sharded->push_back(
                    AtFirst(fully_shard(linear, {.communicator = ranks.replicas}), only_first));
              }
              Pipeline<> pipe(sharded, ranks.communicator,
                              PipelineOptions{.chunks = kChunks, .schedule = schedule});
              const size_t first = rank.where.rank % 2 == 0 ? 0 : 4;
              for (int64_t i = 0; i < 3; ++i) {
                pipe->zero_grad();
                step(pipe, 1, rank.where.rank / 2);
                const Tensors own = pipe->parameters();
                const std::lock_guard<std::mutex> lock(mutex);
                for (size_t k = 0; k < 4; ++k) {
                  const at::Tensor shard =
                      whole[first + k].chunk(2)[static_cast<size_t>(rank.where.rank / 2)];
                  if (!own[k].grad().defined() || !own[k].grad().equal(shard))
                    wrong.push_back("gradient " + std::to_string(k));
                }
              }
            },
            kTimeout, engine);
        CAPTURE(schedule, only_first, engine == Engine::kShm, wrong);
        CHECK(wrong.empty());
      }
    }
  }
}

}  // namespace trireme::replicas_test
