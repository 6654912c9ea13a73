// clip_grad_norm_ against torch's.

#include <trireme/optim/grad_norm.h>

#include <torch/nn/utils/clip_grad.h>

#include <array>
#include <catch_torch.h>
#include <limits>
#include <recording_communicator.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::grad_norm_test {

using trireme::test::Engine;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> gradients(const std::vector<at::ScalarType>& dtypes) {
  at::manual_seed(3);
  std::vector<at::Tensor> all;
  for (const at::ScalarType dtype : dtypes) {
    all.push_back(at::randn({5, 7}, at::kDouble).to(dtype));
    all.push_back(at::randn({}, at::kDouble).to(dtype));
    all.push_back(at::randn({0, 3}, at::kDouble).to(dtype));
  }
  return all;
}

// What torch makes of copies of them, as parameters. It has no largest magnitude of nothing.
std::pair<double, std::vector<at::Tensor>> clipped_by_torch(const std::vector<at::Tensor>& grads,
                                                            double max_norm, double norm_type) {
  std::vector<at::Tensor> parameters, clipped;
  for (const at::Tensor& grad : grads) {
    clipped.push_back(grad.clone());
    if (grad.numel() == 0) continue;
    parameters.push_back(at::zeros_like(grad).set_requires_grad(true));
    parameters.back().mutable_grad() = clipped.back();
  }
  return {torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type), clipped};
}

int64_t count_unlike(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  int64_t unlike = 0;
  for (size_t i = 0; i < a.size(); ++i) unlike += !at::allclose(a[i], b[i], 1e-5, 1e-7);
  return unlike;
}

}  // namespace

TEST_CASE("whole gradients are clipped as torch clips them, whatever the norm") {
  for (const double norm_type : {-kInfinity, -1.0, 0.5, 1.0, 2.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.1, 1e6}) {
      const std::vector<at::Tensor> ours = gradients({at::kFloat, at::kDouble});
      const auto [norm, expected] = clipped_by_torch(ours, max_norm, norm_type);
      const at::Tensor found = clip_grad_norm_({{ours, at::kCPU, nullptr}}, {max_norm, norm_type});
      CHECK(found.scalar_type() == at::kDouble);  // the widest of them
      CHECK(found.item<double>() == Approx(norm));
      CHECK(count_unlike(ours, expected) == 0);
    }
  }
}

TEST_CASE("bf16 and complex gradients") {
  const std::vector<at::Tensor> ours = gradients({at::kBFloat16, at::kComplexFloat});
  double squares = 0;
  for (const at::Tensor& grad : ours)
    squares += grad.to(at::kComplexDouble).abs().square().sum().item<double>();
  const std::vector<at::Tensor> before{ours[0].clone(), ours[3].clone()};
  const at::Tensor norm = clip_grad_norm_({{ours, at::kCPU, nullptr}}, {.max_norm = 0.5});
  CHECK(norm.scalar_type() == at::kFloat);
  CHECK(norm.item<double>() == Approx(std::sqrt(squares)).epsilon(0.01));
  const double scale = 0.5 / std::sqrt(squares);
  CHECK(at::allclose(ours[0], before[0] * scale, 0.02, 1e-3));
  CHECK(at::allclose(ours[3], before[1] * scale, 0.02, 1e-3));
}

TEST_CASE("no gradients have the norm zero") {
  CHECK(clip_grad_norm_({}, {}).item<double>() == 0);
  CHECK(clip_grad_norm_({GradNormPart{}}, {.norm_type = kInfinity}).item<double>() == 0);
}

TEST_CASE("shards and whole gradients have a common norm, the same on all ranks") {
  for (const double norm_type : {-kInfinity, -2.0, 1.0, 2.0, kInfinity}) {
    const std::vector<at::Tensor> all = gradients({at::kFloat, at::kFloat, at::kFloat});
    const auto [norm, expected] = clipped_by_torch(all, 0.3, norm_type);
    std::vector<double> norms(3);
    std::vector<int64_t> unlike(3);
    run_thread_ranks(3, [&](ThreadRank& rank) {
      const auto own = static_cast<size_t>(rank.where.rank);
      // Rank r holds gradients 3 r .. 3 r + 2 but for the first of all, which all ranks have.
      GradNormPart shards{{}, at::kCPU, rank.communicator};
      GradNormPart whole{{all[0].clone()}, at::kCPU, nullptr};
      std::vector<at::Tensor> after;
      for (size_t i = own == 0 ? 1 : 3 * own; i < 3 * own + 3; ++i) {
        shards.gradients.push_back(all[i].clone());
        after.push_back(expected[i]);
      }
      norms[own] = clip_grad_norm_({shards, whole}, {0.3, norm_type}).item<double>();
      unlike[own] =
          count_unlike(shards.gradients, after) + count_unlike(whole.gradients, {expected[0]});
    });
    for (const double found : norms) CHECK(found == Approx(norm));
    CHECK(unlike == std::vector<int64_t>(3));
  }
}

TEST_CASE("a sharded part costs one all-reduce, a whole one nothing") {
  const auto wire = std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  const GradNormPart shards{{at::ones({4})}, at::kCPU, wire};
  const GradNormPart whole{{at::ones({4})}, at::kCPU, nullptr};
  CHECK(clip_grad_norm_({shards, whole}, {}).item<double>() == Approx(std::sqrt(12.0)));
  REQUIRE(wire->records().size() == 1);
  CHECK(wire->records()[0].verb == "all_reduce");
  CHECK(wire->records()[0].bytes <= 16);
}

TEST_CASE("a norm that is not finite raises on all ranks, if that is asked for") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    std::vector<std::string> texts(2);
    std::array<bool, 2> quiet{};  // ranks must not write bits of one word
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          const auto own = static_cast<size_t>(rank.where.rank);
          const at::Tensor grad = at::full({3}, own == 1 ? kInfinity : 1.0);
          const GradNormPart shards{{grad}, at::kCPU, rank.communicator};
          try {
            clip_grad_norm_({shards}, {.error_if_nonfinite = true});
          } catch (const c10::Error& error) {
            texts[own] = error.what_without_backtrace();
          }
          quiet[own] = clip_grad_norm_({shards}, {}).isinf().item<bool>();
        },
        std::chrono::seconds(30), engine);
    for (const std::string& text : texts)
      CHECK_THAT(text, Catch::Contains("[grad_norm] got gradients whose norm is not finite"));
    CHECK(quiet == std::array<bool, 2>{true, true});
  }
}

TEST_CASE("a norm that is none, and one that counts gradients") {
  CHECK_THROWS_WITH(clip_grad_norm_({}, {1.0, std::numeric_limits<double>::quiet_NaN()}),
                    Catch::Contains("[grad_norm] got NaN as norm_type"));
  const std::vector<at::Tensor> ours{at::ones({4}), at::zeros({3}), at::ones({2})};
  CHECK(clip_grad_norm_({{ours, at::kCPU, nullptr}}, {1.0, 0.0}).item<double>() == 2);
  CHECK(ours[0][0].item<double>() == Approx(0.5));
  const auto wire = std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  CHECK_THROWS_WITH(clip_grad_norm_({{ours, at::kCPU, wire}}, {1.0, 0.0}),
                    Catch::Contains("[grad_norm] got norm_type 0, which counts gradients"));
}

}  // namespace trireme::grad_norm_test
