// The statistics by hand, what goes over the wire, and ranks as threads against BatchNorm on the
// whole batch. tests/python/core/test_sync_batch_norm.py has the cases by dtype, layout and option.

#include <trireme/strategies/sync_batch_norm/channel_stats.h>
#include <trireme/strategies/sync_batch_norm/sync_batch_norm_module.h>

#include <catch_torch.h>
#include <recording_communicator.h>
#include <sstream>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::sync_batch_norm_test {

namespace {

using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::WireRecord;

std::shared_ptr<RecordingCommunicator> twins() {
  return std::make_shared<RecordingCommunicator>(RankOf{0, 2});
}

std::string verbs(const RecordingCommunicator& wire) {
  std::string text;
  for (const WireRecord& record : wire.records()) {
    text += record.verb + ' ' + std::to_string(record.bytes) + ", ";
  }
  return text;
}

struct Outcome {
  at::Tensor output, grad_input, grad_weight, grad_bias, running_mean, running_var;
};

template <typename Norm>
Outcome step(Norm& norm, const at::Tensor& batch, const at::Tensor& grad_output) {
  const at::Tensor input = batch.clone().set_requires_grad(true);
  const at::Tensor output = norm->forward(input);
  output.backward(grad_output);
  return {output.detach(),   input.grad(),       norm->weight.grad(),
          norm->bias.grad(), norm->running_mean, norm->running_var};
}

bool close(const at::Tensor& got, const at::Tensor& expected) {
  return at::allclose(got, expected, /*rtol=*/1e-5, /*atol=*/1e-5);
}

}  // namespace

TEST_CASE("parts of a batch combine into the statistics of the whole") {
  //             rank 0      rank 1   rank 2
  //   channel 0  1  3         5       none      mean 3, variance (4 + 0 + 4) / 3
  //   channel 1  2  2         8       none      mean 4, variance (4 + 4 + 16) / 3
  const at::Tensor first = at::tensor({1.F, 2.F, 3.F, 2.F}).view({2, 2});
  const at::Tensor second = at::tensor({5.F, 8.F}).view({1, 2});
  const at::Tensor none = at::empty({0, 2});
  CHECK(at::equal(local_stats(first), at::tensor({2.F, 2.F, 1.F, 0.F, 2.F})));
  CHECK(at::equal(local_stats(none), at::zeros({5})));
  const BatchStats stats =
      combine_stats(at::stack({local_stats(first), local_stats(second), local_stats(none)}), 0.0);
  CHECK(close(stats.mean, at::tensor({3.F, 4.F})));
  CHECK(close(stats.var, at::tensor({8.F / 3, 8.F})));
  CHECK(close(stats.invstd.square() * stats.var, at::ones({2})));
  CHECK(at::equal(stats.counts, at::tensor({2.F, 1.F, 0.F})));

  at::Tensor mean = at::zeros({2});
  at::Tensor var = at::zeros({2});
  update_running_stats(mean, var, stats, 0.5);
  CHECK(close(mean, at::tensor({1.5F, 2.F})));
  CHECK(close(var, at::tensor({2.F, 6.F})));  // half of the unbiased 4 and 12
}

TEST_CASE("a small variance far from zero survives the combination") {
  const at::Tensor batch = at::arange(8, at::kFloat).view({8, 1}) + 1e6F;
  const at::Tensor parts =
      at::stack({local_stats(batch.slice(0, 0, 3)), local_stats(batch.slice(0, 3))});
  CHECK(close(combine_stats(parts, 0.0).var, at::tensor({5.25F})));
}

TEST_CASE("a step is one all-gather and one all-reduce") {
  const auto wire = twins();
  SyncBatchNorm norm(SyncBatchNormOptions(3), wire);
  const at::Tensor batch = at::randn({4, 3, 2});
  const at::Tensor input = batch.clone().set_requires_grad(true);
  const at::Tensor output = norm->forward(input);
  CHECK(verbs(*wire) == "all_gather 8, all_gather 28, ");  // the layout, once; 2 x 3 + 1 floats
  wire->clear();
  output.sum().backward();
  CHECK(verbs(*wire) == "all_reduce 24, ");
  CHECK(wire->records()[0].label == "gradient sums of a batch norm of 3 channels");
  wire->clear();
  {
    const at::NoGradGuard no_grad;
    norm->forward(batch.slice(0, 0, 0));
  }
  CHECK(verbs(*wire) == "all_gather 28, ");
  wire->clear();
  norm->eval();
  norm->forward(input).sum().backward();
  CHECK(wire->records().empty());

  norm->train();
  norm->to(at::kDouble);
  norm->forward(batch.to(at::kDouble));
  CHECK(verbs(*wire) == "all_gather 8, all_gather 56, ");
}

TEST_CASE("an input that wants no gradient still takes part in backward") {
  const auto wire = twins();
  SyncBatchNorm norm(SyncBatchNormOptions(3), wire);
  norm->forward(at::empty({0, 3})).sum().backward();
  CHECK(wire->records().back().verb == "all_reduce");
  CHECK(at::equal(norm->weight.grad(), at::zeros({3})));
}

TEST_CASE("a mean and a variance from the peer's half are those of both") {
  // The twin holds the same batch, so the whole has this batch's mean and biased variance.
  SyncBatchNorm norm(SyncBatchNormOptions(2).momentum(1.0), twins());
  const at::Tensor batch = at::randn({6, 2, 5});
  norm->forward(batch);
  const auto [var, mean] = at::var_mean(batch, at::IntArrayRef{0, 2}, /*unbiased=*/false);
  CHECK(close(norm->running_mean, mean));
  CHECK(close(norm->running_var, var * 60 / 59));
}

TEST_CASE("ranks together equal BatchNorm2d on the whole batch") {
  at::manual_seed(1);
  const std::vector<int64_t> rows{3, 0, 2};
  const at::Tensor batch = at::randn({5, 4, 3, 2}) * 2 + 1;
  const at::Tensor grad_output = at::randn_like(batch);
  const auto momentum = GENERATE(std::optional<double>(0.3), std::optional<double>());
  const auto options = SyncBatchNormOptions(4).momentum(momentum).eps(1e-3);

  torch::nn::BatchNorm2d whole(options);
  step(whole, batch, grad_output);
  const Outcome expected = step(whole, batch * 3, grad_output);

  std::vector<Outcome> outcomes(rows.size());
  const std::vector<at::Tensor> batches = batch.split_with_sizes(rows);
  const std::vector<at::Tensor> grads = grad_output.split_with_sizes(rows);
  run_thread_ranks(3, [&](ThreadRank& rank) {
    const auto own = static_cast<size_t>(rank.where.rank);
    SyncBatchNorm norm(options, rank.communicator);
    step(norm, batches[own], grads[own]);
    outcomes[own] = step(norm, batches[own] * 3, grads[own]);
  });

  const auto all = [&](at::Tensor Outcome::* part) {
    return std::vector<at::Tensor>{outcomes[0].*part, outcomes[1].*part, outcomes[2].*part};
  };
  CHECK(close(at::cat(all(&Outcome::output)), expected.output));
  CHECK(close(at::cat(all(&Outcome::grad_input)), expected.grad_input));
  CHECK(close(at::stack(all(&Outcome::grad_weight)).sum(0), expected.grad_weight));
  CHECK(close(at::stack(all(&Outcome::grad_bias)).sum(0), expected.grad_bias));
  for (const Outcome& outcome : outcomes) {
    CHECK(close(outcome.running_mean, expected.running_mean));
    CHECK(close(outcome.running_var, expected.running_var));
  }
}

TEST_CASE("ranks that disagree on the channels all learn it") {
  std::vector<std::string> texts(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const int64_t channels = 3 + rank.where.rank;
    SyncBatchNorm norm(SyncBatchNormOptions(channels), rank.communicator);
    try {
      norm->forward(at::ones({2, channels}));
    } catch (const c10::ValueError& error) {
      texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
    }
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(texts[rank] ==
          "[sync_batch_norm] got 3 channels with statistics in Float on rank 0 but 4 channels with "
          "statistics in Float on rank 1, expected the same (rank " +
              std::to_string(rank) + " of 2). Build and cast the model alike on every rank.");
  }
}

TEST_CASE("the module is a BatchNorm to whoever saves, clones or prints it") {
  SyncBatchNorm norm(SyncBatchNormOptions(3).momentum(std::nullopt), twins());
  torch::nn::BatchNorm1d plain(3);
  CHECK(norm->named_parameters().keys() == plain->named_parameters().keys());
  CHECK(norm->named_buffers().keys() == plain->named_buffers().keys());

  norm->forward(at::randn({4, 3}));
  const auto clone = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  REQUIRE(clone);
  CHECK(at::equal(clone->running_mean, norm->running_mean));
  CHECK_FALSE(clone->running_mean.is_same(norm->running_mean));
  clone->forward(at::randn({4, 3}));
  CHECK(clone->num_batches_tracked.item<int64_t>() == 2);
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);

  std::ostringstream text;
  text << *norm;
  CHECK(
      text.str() ==
      "trireme::SyncBatchNorm(3, eps=1e-05, momentum=None, affine=true, track_running_stats=true)");
}

TEST_CASE("bad calls name what they got") {
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(SyncBatchNorm(SyncBatchNormOptions(3), nullptr),
                    Contains("[sync_batch_norm] got no communicator"));
  SyncBatchNorm norm(SyncBatchNormOptions(3), twins());
  CHECK_THROWS_AS(norm->forward(at::ones({3})), c10::ValueError);
  CHECK_THROWS_WITH(norm->forward(at::ones({2, 5})),
                    Contains("got an input of 5 channels, expected 3 as in weight (rank 0 of 2)"));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 0);
  norm->eval();
  CHECK_THROWS_WITH(norm->forward(at::ones({3})), Contains("got an input of shape [3]"));
}

}  // namespace trireme::sync_batch_norm_test
