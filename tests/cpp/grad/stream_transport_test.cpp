// Buckets as a stream of deposits: ranks that share memory, as threads.

#include <trireme/common/cpus.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/grad/whole_delivery.h>

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch_torch.h>
#include <functional>
#include <thread_ranks.h>
#include <vector>

namespace trireme::stream_wire_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

// Parameters of the given tensors; the loss is the sum of rank- and step-dependent multiples, so
// every gradient is known.
struct Model {
  Model(const std::vector<at::Tensor>& shapes, ThreadRank& rank, GradReducerOptions options = {})
      : rank(rank) {
    // Deposits are only for ranks that take all CPUs.
    at::set_num_threads(static_cast<int>(usable_cpus()));
    NamedParameters parameters;
    for (const at::Tensor& like : shapes) {
      weights.push_back(at::zeros_like(like).set_requires_grad(true));
      parameters.names.push_back("w" + std::to_string(weights.size() - 1));
      parameters.tensors.push_back(weights.back());
      parameters.sparse_gradient.push_back(false);
    }
    GradReducerParts parts{rank.communicator, trigger, std::make_shared<WholeDelivery>(trigger)};
    reducer = GradReducer::make(parameters, std::move(parts), options);
  }

  // d loss / d weight i = factor(i, rank, step).
  static double factor(size_t i, int64_t rank, int64_t step) {
    return static_cast<double>(static_cast<int64_t>(i) + 1 + 4 * rank + 8 * step);
  }
  void step(int64_t number, const std::function<bool(size_t)>& uses = [](size_t) { return true; }) {
    trigger->before_forward();
    at::Tensor loss = at::zeros({}, at::kComplexDouble);
    for (size_t i = 0; i < weights.size(); ++i)
      if (uses(i)) loss = loss + weights[i].sum() * factor(i, rank.where.rank, number);
    loss = at::real(loss);
    trigger->after_forward({loss}, true);
    torch::autograd::backward({loss}, {});
  }
  // How many gradients are not `expected(i)` everywhere.
  int64_t wrong(const std::function<double(size_t)>& expected) const {
    int64_t count = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor& grad = weights[i].grad();
      const at::Tensor all = at::full_like(weights[i].detach(), expected(i));
      if (!grad.defined() || !at::equal(grad, all) || grad.sizes() != all.sizes()) ++count;
    }
    return count;
  }
  void zero_grad() {
    for (const at::Tensor& weight : weights) weight.mutable_grad().reset();
  }

  ThreadRank& rank;
  std::vector<at::Tensor> weights;
  std::shared_ptr<BackwardTrigger> trigger = std::make_shared<BackwardTrigger>();
  std::shared_ptr<GradReducer> reducer;
};

double mean_factor(size_t i, int64_t world, int64_t step) {
  double sum = 0;
  for (int64_t rank = 0; rank < world; ++rank) sum += Model::factor(i, rank, step);
  return sum / static_cast<double>(world);
}

std::vector<at::Tensor> mixed_shapes() {
  return {at::empty({7, 3}),
          at::empty({}),
          at::empty({0, 4}),
          at::empty({5, 11}, at::kDouble),
          at::empty({6, 9}, at::kBFloat16),
          at::empty({1000}, at::kHalf),
          at::empty({3, 5}, at::kComplexFloat),
          at::empty({4, 6}).t(),
          at::empty({2, 3, 4, 5}).to(at::MemoryFormat::ChannelsLast),
          at::empty({3000, 1000})};  // more than the ring holds
}

}  // namespace

TEST_CASE("gradients of all kinds are averaged in one stream, whatever .grad was before") {
  for (const int64_t world : {2, 4}) {
    std::vector<int64_t> wrong(static_cast<size_t>(world));
    std::vector<int> streamed(static_cast<size_t>(world));
    run_thread_ranks(
        world,
        [&](ThreadRank& rank) {
          const auto own = static_cast<size_t>(rank.where.rank);
          GradReducerOptions options;
          options.caps = {{256, 4096}};
          Model model(mixed_shapes(), rank, options);
          for (int64_t step = 0; step < 6; ++step) {
            const bool keeps = step == 3 || step == 4;  // accumulates in place
            if (!keeps) model.zero_grad();
            model.step(step);
            wrong[own] += model.wrong([&](size_t i) {
              double sum = mean_factor(i, world, step);
              if (keeps) sum += mean_factor(i, world, 2);
              if (step == 4) sum += mean_factor(i, world, 3);
              return sum;
            });
            streamed[own] += model.reducer->last_step().streamed;
          }
        },
        std::chrono::seconds(60), Engine::kShm);
    CHECK(wrong == std::vector<int64_t>(static_cast<size_t>(world)));
    // The first backward teaches the order, by buckets.
    CHECK(streamed == std::vector<int>(static_cast<size_t>(world), 5));
  }
}

TEST_CASE("what a rank does not use counts as zeros; what nobody uses keeps its .grad") {
  std::vector<int> wrong(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        Model model({at::empty({300}), at::empty({5}), at::empty({40, 2}), at::empty({9})}, rank);
        for (int64_t step = 0; step < 12; ++step) {
          model.zero_grad();
          model.weights[3].mutable_grad() = at::full({9}, 5.0F);
          model.step(step, [&](size_t i) { return i == 0 || (i == 1 + own && step % 3 != 2); });
          const auto is = [&](size_t i, double value) {
            const at::Tensor& grad = model.weights[i].grad();
            return grad.defined() && at::equal(grad, at::full_like(grad, value));
          };
          wrong[own] += !is(0, mean_factor(0, 2, step)) || !is(3, 5);
          for (const size_t i : {size_t{1}, size_t{2}}) {
            const double half = Model::factor(i, static_cast<int64_t>(i) - 1, step) / 2;
            wrong[own] += step % 3 != 2 ? !is(i, half) : model.weights[i].grad().defined();
          }
        }
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong == std::vector<int>(2));
}

TEST_CASE("after a backward that one rank abandoned all raise, and the next step works") {
  constexpr int64_t kSteps = 8;
  std::vector<std::string> said(2);
  std::vector<int64_t> wrong(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        Model model({at::empty({300}), at::empty({500'000}), at::empty({7})}, rank);
        bool spills = false;
        model.weights[1].register_hook(
            [&](const at::Tensor&) { TORCH_CHECK(!spills, "spilled the coffee"); });
        for (int64_t step = 0; step < kSteps; ++step) {
          model.zero_grad();
          spills = step % 3 == 1 && rank.where.rank == step % 2;
          try {
            model.step(step);
            wrong[own] += step % 3 == 1;
            wrong[own] += model.wrong([&](size_t i) { return mean_factor(i, 2, step); });
          } catch (const std::exception& error) {
            wrong[own] += step % 3 != 1;
            if (step == 1) said[own] = error.what();
          }
        }
      },
      std::chrono::seconds(20), Engine::kShm);
  CHECK(wrong == std::vector<int64_t>(2));
  CHECK_THAT(said[1], Catch::Contains("spilled the coffee"));
  CHECK_THAT(said[0], Catch::Contains("rank 1 (process") &&
                          Catch::Contains("[ddp] backward 2 was abandoned after the gradient of"));
}

TEST_CASE("ranks that leave CPUs free keep to buckets") {
  if (usable_cpus() < 3) {
    SUCCEED("two ranks take all CPUs");
    return;
  }
  std::vector<int> streamed(2, 1);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Model model({at::empty({300})}, rank);
        at::set_num_threads(1);
        model.step(0);
        model.zero_grad();
        model.step(1);
        streamed[static_cast<size_t>(rank.where.rank)] = model.reducer->last_step().streamed;
      },
      std::chrono::seconds(20), Engine::kShm);
  CHECK(streamed == std::vector<int>{0, 0});
}

}  // namespace trireme::stream_wire_test
