#include <trireme/strategies/pipeline/pipeline.h>

#include <torch/nn.h>

#include <catch_torch.h>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::deferred_batch_norm_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;

// Keeps what its norm is given.
struct WatchedImpl : torch::nn::Module {
  explicit WatchedImpl(torch::nn::BatchNormOptions options) : norm(std::move(options)) {
    register_module("norm", norm);
  }
  at::Tensor forward(at::Tensor x) {
    seen.push_back(x.detach());
    return norm->forward(x);
  }
  torch::nn::BatchNorm1d norm;
  std::vector<at::Tensor> seen;
};
TORCH_MODULE(Watched);

struct BreaksImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    if (breaks) throw std::runtime_error("the data are broken");
    return x;
  }
  bool breaks = false;
};
TORCH_MODULE(Breaks);

torch::nn::BatchNormOptions features() { return torch::nn::BatchNormOptions(6); }

std::mutex seed_mutex;

torch::nn::Sequential normed_net() {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(3);
  Watched frozen(features());
  frozen->norm->running_mean.fill_(0.25);
  frozen->eval();
  return torch::nn::Sequential(torch::nn::Linear(6, 6), Watched(features()), torch::nn::Tanh(),
                               Watched(features().momentum(c10::nullopt)), torch::nn::Linear(6, 6),
                               Watched(features().track_running_stats(false)),
                               torch::nn::Unflatten(1, std::vector<int64_t>{3, 2, 1}),
                               torch::nn::BatchNorm2d(3), torch::nn::Flatten(),
                               torch::nn::Linear(6, 6), frozen, Breaks());
}

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(66, at::kDouble).view({11, 6}) * double(step + 1)).to(at::kFloat);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

std::vector<at::Tensor> statistics_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const auto& buffer : module.named_buffers()) found.push_back(buffer.value().clone());
  return found;
}

bool are_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  if (got.size() != expected.size()) return false;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!got[i].allclose(expected[i], 1e-5, 1e-6)) return false;
  }
  return true;
}

// Says what is wrong after a step of a pipeline: each norm is compared with one that begins where
// it did, and has one forward over the whole batch.
class Oracle {
 public:
  explicit Oracle(const torch::nn::Module& pipe) {
    for (const auto& item : pipe.named_children()) {
      const auto watched = std::dynamic_pointer_cast<WatchedImpl>(item.value());
      if (!watched) continue;
      auto whole = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(watched->norm->clone());
      norms_.push_back({item.key(), watched, whole});
      watched->seen.clear();
    }
  }

  std::vector<std::string> wrong_after_step() {
    std::vector<std::string> wrong;
    for (const Norm& norm : norms_) {
      if (norm.watched->seen.size() != 4) wrong.push_back("micro-batches of " + norm.name);
      norm.whole->forward(at::cat(norm.watched->seen));
      if (!are_close(statistics_of(*norm.watched->norm), statistics_of(*norm.whole)))
        wrong.push_back("statistics of " + norm.name);
    }
    return wrong;
  }

 private:
  struct Norm {
    std::string name;
    std::shared_ptr<WatchedImpl> watched;
    std::shared_ptr<torch::nn::BatchNorm1dImpl> whole;
  };
  std::vector<Norm> norms_;
};

PipelineOptions deferred(const std::string& schedule) {
  PipelineOptions options;
  options.chunks = 4;  // eleven rows: uneven
  options.schedule = schedule;
  options.deferred_batch_norm = true;
  return options;
}

// Runs ranks that return what is wrong.
template <typename Run>
std::vector<std::string> wrong_on_ranks(int64_t world, const Run& run) {
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        const std::vector<std::string> here = run(rank);
        const std::lock_guard<std::mutex> lock(mutex);
        wrong.insert(wrong.end(), here.begin(), here.end());
      },
      std::chrono::seconds(30), Engine::kShm);
  return wrong;
}

TEST_CASE("running statistics are those of whole batches under every schedule") {
  for (const char* schedule : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                               "dualpipe-v", "zb-auto"}) {
    const auto wrong = wrong_on_ranks(2, [&](ThreadRank& rank) {
      Pipeline<> pipe(normed_net(), rank.communicator, deferred(schedule));
      std::vector<std::string> here;
      for (int64_t step = 0; step < 3; ++step) {
        Oracle oracle(*pipe);
        pipe->step(rows(step), rows(step + 9), loss_of);
        for (const std::string& what : oracle.wrong_after_step())
          here.push_back(what + " in step " + std::to_string(step));
      }
      return here;
    });
    CAPTURE(schedule, wrong);
    CHECK(wrong.empty());
  }
}

TEST_CASE("a deferred BatchNorm2d in a Sequential is tracked once per step") {
  const auto wrong = wrong_on_ranks(1, [](ThreadRank& rank) {
    torch::nn::Sequential net(torch::nn::BatchNorm2d(3));
    torch::nn::BatchNorm2d whole(3);
    Pipeline<> pipe(net, rank.communicator, deferred("gpipe"));
    const at::Tensor x = rows(0).view({11, 3, 2, 1}) * 2 + 30;
    whole->forward(x);
    pipe->step(x, x, loss_of);
    const bool is_close = are_close(statistics_of(*net), statistics_of(*whole));
    return is_close ? std::vector<std::string>{} : std::vector<std::string>{"statistics"};
  });
  CHECK(wrong.empty());
}

TEST_CASE("gradients and losses are those of plain BatchNorm, and so is an evaluation") {
  const auto wrong = wrong_on_ranks(2, [](ThreadRank& rank) {
    PipelineOptions plain_options = deferred("1f1b");
    plain_options.deferred_batch_norm = false;
    Pipeline<> pipe(normed_net(), rank.communicator, deferred("1f1b"));
    Pipeline<> plain(normed_net(), rank.communicator, plain_options);
    std::vector<std::string> here;
    if (!pipe->step(rows(0), rows(1), loss_of).equal(plain->step(rows(0), rows(1), loss_of)))
      here.push_back("loss");
    const auto other = plain->named_parameters();
    for (const auto& item : pipe->named_parameters())
      if (!item.value().grad().equal(other[item.key()].grad())) here.push_back(item.key());
    if (are_close(statistics_of(*pipe), statistics_of(*plain))) here.push_back("same statistics");
    pipe->eval();
    const auto before = statistics_of(*pipe);
    pipe->eval_step(rows(2), rows(3), loss_of);
    if (!are_close(statistics_of(*pipe), before)) here.push_back("changed by an evaluation");
    return here;
  });
  CAPTURE(wrong);
  CHECK(wrong.empty());
}

TEST_CASE("a step that failed leaves running statistics as they were") {
  const auto wrong = wrong_on_ranks(2, [](ThreadRank& rank) {
    Pipeline<> pipe(normed_net(), rank.communicator, deferred("1f1b"));
    pipe->step(rows(0), rows(1), loss_of);
    const auto before = statistics_of(*pipe);
    const auto set = [&](bool breaks) {
      for (const auto& item : pipe->named_children())
        if (auto* layer = dynamic_cast<BreaksImpl*>(item.value().get())) layer->breaks = breaks;
    };
    set(true);
    std::vector<std::string> here{"no error"};
    try {
      pipe->step(rows(2), rows(3), loss_of);
    } catch (const std::exception&) {
      here.clear();
    }
    if (!are_close(statistics_of(*pipe), before)) here.push_back("changed by a failed step");
    set(false);
    Oracle oracle(*pipe);
    pipe->step(rows(4), rows(5), loss_of);
    for (const std::string& what : oracle.wrong_after_step()) here.push_back(what);
    return here;
  });
  CAPTURE(wrong);
  CHECK(wrong.empty());
}

// Are known by their name, and by their statistics.
struct SyncBatchNormImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
struct OwnRulesImpl : torch::nn::Module {
  OwnRulesImpl() { register_buffer("num_batches_tracked", at::zeros({}, at::kLong)); }
  at::Tensor forward(at::Tensor x) { return x; }
};
TORCH_MODULE(SyncBatchNorm);
TORCH_MODULE(OwnRules);

TEST_CASE("replicas of a pipeline begin a step with the running statistics of the first") {
  std::mutex mutex;
  std::vector<std::vector<at::Tensor>> found(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        torch::nn::Sequential net(torch::nn::BatchNorm1d(features()), torch::nn::Linear(6, 6));
        Pipeline<> pipe(net, rank.communicator,
                        PipelineOptions{.chunks = 2, .replicas = 2, .deferred_batch_norm = true});
        pipe->step(rows(rank.where.rank), rows(7), loss_of);
        pipe->step(rows(2), rows(7), loss_of);  // all copies see it
        const std::lock_guard<std::mutex> lock(mutex);
        found[static_cast<size_t>(rank.where.rank)] = statistics_of(*pipe);
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(found[0].size() == 3);
  CHECK(are_close(found[1], found[0]));
}

TEST_CASE("other batch norms are refused by name") {
  run_thread_ranks(1, [](ThreadRank& rank) {
    torch::nn::Sequential net{SyncBatchNorm()};
    CHECK_THROWS_WITH(Pipeline<>(net, rank.communicator, deferred("gpipe")),
                      Catch::Contains("SyncBatchNormImpl as '0' to be deferred"));
    torch::nn::Sequential own{OwnRules()};
    CHECK_THROWS_WITH(Pipeline<>(own, rank.communicator, deferred("gpipe")),
                      Catch::Contains("OwnRulesImpl as '0' to be deferred"));
    torch::nn::Sequential fine(
        torch::nn::InstanceNorm1d(torch::nn::InstanceNorm1dOptions(6).track_running_stats(true)));
    Pipeline<>(fine, rank.communicator, deferred("gpipe"));
  });
}

}  // namespace trireme::deferred_batch_norm_test
