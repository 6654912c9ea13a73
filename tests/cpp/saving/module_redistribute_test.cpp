// A training goes on under another strategy, on other ranks, with the module and the optimizer
// brought over in memory, as if nothing had happened.

#include <trireme/saving/module_redistribute.h>

#include <trireme/comm/launch/make_communicator.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <memory>
#include <mutex>
#include <strategies/fsdp/fsdp_ranks.h>
#include <string>
#include <utility>
#include <vector>

namespace trireme::module_redistribute_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

enum class Under : uint8_t { kPlain, kDdp, kZero1, kZero2, kFsdp };

// A strategy on the first ranks, or, with `from_end`, on the last.
struct Place {
  Under under = Under::kPlain;
  int64_t ranks = 1;
  bool from_end = false;
};

// The ranks of a place, this one among them, as a communicator; null on others.
std::shared_ptr<Communicator> part_of(ThreadRank& all, const Place& place) {
  const int64_t first = place.from_end ? all.where.world - place.ranks : 0;
  std::vector<int> ranks;
  for (int64_t rank = first; rank < first + place.ranks; ++rank)
    ranks.push_back(static_cast<int>(rank));
  const int64_t own = all.where.rank;
  if (own < first || own >= first + place.ranks) return nullptr;
  return all.communicator->split(
      ranks, "part " + std::to_string(first) + " " + std::to_string(place.ranks));
}

// A net under a strategy, with its optimizer, on one rank.
class Training {
 public:
  Training(Under under, std::shared_ptr<Communicator> ranks, const AdamWOptions& options)
      : ranks_(std::move(ranks)) {
    if (under == Under::kFsdp) {
      auto model = fully_shard(net_, FsdpOptions{.communicator = ranks_});
      optimizer_ = std::make_unique<AdamW>(model->parameters(), options);
      forward_ = [model](const at::Tensor& x, bool head) mutable {
        return model->forward(x, head);
      };
      values_ = [model, this]() mutable { return whole_values(*model, net_->parameters()); };
      module_ = model.get();
      kept_ = std::make_shared<decltype(model)>(model);
    } else if (under == Under::kDdp || under == Under::kZero1) {
      DistributedDataParallel<UnevenNet> model(net_, ranks_);
      forward_ = [model](const at::Tensor& x, bool head) mutable {
        return model->forward(x, head);
      };
      module_ = model.get();
      kept_ = model.ptr();
    }
    if (under == Under::kZero1 || under == Under::kZero2) {
      ZeroOptions zero;
      zero.stage = under == Under::kZero1 ? 1 : 2;
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(net_, options, ranks_, zero);
    }
    if (!optimizer_) optimizer_ = std::make_unique<AdamW>(net_->parameters(), options);
  }

  void train(int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      optimizer_->zero_grad();
      const at::Tensor x = part_of_batch(step, ranks_->rank_of());
      const at::Tensor loss =
          forward_ ? forward_(x, step % 2 == 0) : net_->forward(x, step % 2 == 0);
      loss.backward();
      trireme::step(*optimizer_);
    }
  }

  void spoil() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net_->parameters()) parameter.add_(1);
  }
  TrainedModule both() { return {module_ != nullptr ? module_ : net_.get(), optimizer_.get()}; }
  Values values() { return values_ ? values_() : values_of(net_->parameters()); }

 private:
  std::shared_ptr<Communicator> ranks_;
  UnevenNet net_;
  std::shared_ptr<void> kept_;
  torch::nn::Module* module_ = nullptr;
  std::function<at::Tensor(const at::Tensor&, bool)> forward_;
  std::function<Values()> values_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Three steps at `before` and two at `after`: the rank that differs most from a training without a
// break, in parameters.
int64_t unlike_after(const Place& before, const Place& after) {
  const auto options = AdamWOptions(0.01).weight_decay(0.1).amsgrad(true);
  const Values expected = train_alone<AdamW>(options, 5);
  std::mutex mutex;
  int64_t most = 0;
  run_thread_ranks(
      std::max(before.ranks, after.ranks),
      [&](ThreadRank& rank) {
        std::unique_ptr<Training> first, second;
        if (const auto ranks = part_of(rank, before)) {
          first = std::make_unique<Training>(before.under, ranks, options);
          first->train(0, 3);
        }
        const auto ranks = part_of(rank, after);
        if (ranks) second = std::make_unique<Training>(after.under, ranks, AdamWOptions(0.5));
        redistribute(first ? first->both() : TrainedModule(),
                     second ? second->both() : TrainedModule(), rank.communicator);
        if (!second) return;
        second->train(3, 5);
        const int64_t unlike = count_unlike(second->values(), expected);
        const std::lock_guard<std::mutex> lock(mutex);
        most = unlike < 0 ? 1000 : std::max(most, unlike);
      },
      std::chrono::seconds(60), Engine::kShm);
  return most;
}

}  // namespace

TEST_CASE("ddp becomes fully_shard in memory, and every strategy any other one") {
  for (const Under before : {Under::kDdp, Under::kZero2, Under::kFsdp})
    for (const Under after : {Under::kDdp, Under::kZero1, Under::kZero2, Under::kFsdp})
      CHECK(unlike_after({before, 2}, {after, 2}) == 0);
}

TEST_CASE("the ranks of before and after are others: four become two, and one three") {
  CHECK(unlike_after({Under::kFsdp, 4}, {Under::kFsdp, 2}) == 0);
  CHECK(unlike_after({Under::kZero2, 4}, {Under::kDdp, 2, true}) == 0);
  CHECK(unlike_after({Under::kZero1, 3, true}, {Under::kFsdp, 4}) == 0);
  CHECK(unlike_after({Under::kPlain, 1}, {Under::kZero2, 3}) == 0);
}

namespace {

// Buffers and a frozen layer.
torch::nn::Sequential make_net(int64_t seed) {
  static std::mutex seed_mutex;
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(static_cast<uint64_t>(seed));
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Tanh(),
                            torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
  for (const at::Tensor& buffer : net->buffers()) buffer.add_(seed);
  for (const at::Tensor& parameter : net->ptr(3)->parameters()) parameter.requires_grad_(false);
  return net;
}

}  // namespace

TEST_CASE("layers move to other stages, with buffers and optimizer state") {
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        const auto& all = rank.communicator;
        const auto cut = [](std::vector<int64_t> balance) {
          return PipelineOptions{.chunks = 2, .balance = std::move(balance)};
        };
        Pipeline<> before(make_net(1), all, cut({1, 2, 2}));
        AdamW stepping(before->parameters(), AdamWOptions(0.1));
        const at::Tensor x = at::ones({4, 4});
        const auto loss = [](const at::Tensor& y, const at::Tensor& z) { return (y - z).sum(); };
        before->step(x, at::zeros({4, 2}), loss);
        stepping.step();
        Pipeline<> after(make_net(2), all, cut({3, 1, 1}));
        AdamW resumed(after->parameters(), AdamWOptions(0.5));
        redistribute({before.get(), &stepping}, {after.get(), &resumed}, all);
        // Back: each rank has again what it had, and may compare.
        Pipeline<> again(make_net(3), all, cut({1, 2, 2}));
        AdamW last(again->parameters(), AdamWOptions(0.5));
        redistribute({after.get(), &resumed}, {again.get(), &last}, all);
        const auto report = [&](bool same, const std::string& what) {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!same) wrong.push_back(what);
        };
        const auto compare = [&](const auto& ours, const auto& theirs) {
          for (const auto& item : theirs)
            report(at::equal(ours[item.key()], item.value()), item.key());
        };
        compare(again->named_parameters(), before->named_parameters());
        compare(again->named_buffers(), before->named_buffers());
        report(last.state().size() == stepping.state().size(), "the number of states");
        for (size_t i = 0; i < before->parameters().size(); ++i) {
          const auto state_of = [i](AdamW& optimizer, Pipeline<>& pipe) {
            const auto found = optimizer.state().find(pipe->parameters()[i].unsafeGetTensorImpl());
            return found == optimizer.state().end()
                       ? at::Tensor()
                       : static_cast<torch::optim::AdamWParamState&>(*found->second).exp_avg();
          };
          const at::Tensor ours = state_of(last, again), theirs = state_of(stepping, before);
          report(ours.defined() == theirs.defined(), "whether there is a state");
          if (ours.defined() && theirs.defined()) report(at::equal(ours, theirs), "a state");
        }
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong == std::vector<std::string>());
}

TEST_CASE("what cannot be redistributed is refused on all ranks") {
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto& all = rank.communicator;
        const auto expect = [&](const TrainedModule& source, const TrainedModule& target,
                                const std::string& part) {
          const std::string error = error_of([&] { redistribute(source, target, all); });
          const std::lock_guard<std::mutex> lock(mutex);
          if (error.find(part) == std::string::npos) wrong.push_back(error);
        };
        UnevenNet net, other;
        torch::nn::Linear small(2, 2);
        AdamW optimizer(net->parameters(), AdamWOptions(0.1));
        AdamW second(other->parameters(), AdamWOptions(0.1));
        expect({net.get()}, {net.get()}, "got one module before and after");
        expect({nullptr, &optimizer}, {other.get()}, "got an optimizer without its module");
        expect({net.get()}, {small.get()}, "got a checkpoint without 'weight' in memory");
        expect({net.get()}, {other.get(), &second}, "got a checkpoint without an optimizer");
        expect({}, {other.get()}, "got a checkpoint without model in memory");
        expect({net.get()}, {rank.where.rank == 0 ? other.get() : nullptr, nullptr}, "no error");
        redistribute({net.get(), &optimizer}, {other.get(), &second}, all);
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(wrong == std::vector<std::string>());
}

}  // namespace trireme::module_redistribute_test
