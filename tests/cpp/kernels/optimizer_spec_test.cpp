// Options of optimizers as one value: steps as torch's, texts, what is refused. Adagrad's loops.

#include <trireme/kernels/optimizer_spec.h>

#include <trireme/kernels/cpu/optimizer_loops.h>

#include <torch/optim.h>

#include "catch_torch.h"
#include "kernels/optimizer_reference.h"

namespace trireme::optimizer_spec_test {

namespace {

using reference::magnitudes;

constexpr int64_t kNumel = 1003;

struct Stepped {
  at::Tensor param = magnitudes({kNumel}, at::kFloat, 1);
  at::Tensor first = at::zeros({kNumel});
  at::Tensor second = at::zeros({kNumel});

  void step(const OptimizerSpec& spec, int64_t number, at::Tensor grad, double factor = 1) {
    OptimizerSegment segment;
    segment.param = param.data_ptr();
    segment.grad = grad.data_ptr();
    segment.exp_avg = first.data_ptr();
    segment.exp_avg_sq = second.data_ptr();
    if (const auto* sgd = std::get_if<SgdSpec>(&spec); sgd != nullptr && sgd->momentum == 0)
      segment.exp_avg = nullptr;
    segment.numel = kNumel;
    step_segment(spec, segment, {at::kFloat, grad.scalar_type()},
                 {learning_rate_of(spec), number, factor});
  }
};

at::Tensor gradient(uint64_t step) { return magnitudes({kNumel}, at::kFloat, 20 + step); }

// How many units in the last place two fp32 tensors differ by at most.
int64_t most_ulps(const at::Tensor& a, const at::Tensor& b) {
  return (a.view(at::kInt).to(at::kLong) - b.view(at::kInt).to(at::kLong))
      .abs()
      .max()
      .item<int64_t>();
}

template <typename Torch, typename TorchOptions>
void check_as_torch(const OptimizerSpec& spec, const TorchOptions& options) {
  Stepped ours;
  at::Tensor theirs = ours.param.clone();
  Torch optimizer(std::vector<at::Tensor>{theirs}, options);
  for (int64_t number = 1; number <= 10; ++number) {
    const at::Tensor grad = gradient(static_cast<uint64_t>(number));
    theirs.mutable_grad() = grad.clone();
    optimizer.step();
    ours.step(spec, number, grad);
  }
  CHECK(at::allclose(ours.param, theirs, 1e-5, 1e-7));
}

}  // namespace

TEST_CASE("a step of Adagrad comes within 1 ulp of torch's, in every loop") {
  for (const cpu::OptimizerLoops& loops : cpu::supported_optimizer_loops()) {
    INFO(loops.isa);
    at::Tensor param = magnitudes({kNumel}, at::kFloat, 1);
    at::Tensor sum = magnitudes({kNumel}, at::kFloat, 2).abs();
    at::Tensor grad = gradient(1);
    const at::Tensor expected_sum = sum + grad * grad;
    const at::Tensor step = (grad * -0.1f) / (expected_sum.sqrt() + 1e-10f);
    const at::Tensor expected = param + step;
    // Where parameter and step nearly cancel out, their own units count, not that of the result.
    const at::Tensor bound = (param.abs() + step.abs()) * 3e-7f;
    OptimizerSegment segment;
    segment.param = param.data_ptr();
    segment.grad = grad.data_ptr();
    segment.exp_avg_sq = sum.data_ptr();
    segment.numel = kNumel;
    loops.adagrad[0](segment, adagrad_scalars({0.1, 1e-10}));
    CHECK(most_ulps(sum, expected_sum) <= 1);
    CHECK(((param - expected).abs() <= bound).all().item<bool>());
  }
}

TEST_CASE("a step of rowwise Adagrad comes within 1 ulp of fp64, in every loop and dtype") {
  for (const cpu::OptimizerLoops& loops : cpu::supported_optimizer_loops()) {
    for (const int64_t dim : {1, 15, 16, 64, 1003}) {
      CAPTURE(loops.isa, dim);
      at::Tensor param = magnitudes({dim}, at::kFloat, 1);
      at::Tensor grad = magnitudes({dim}, at::kFloat, 2);
      at::Tensor sum = at::tensor({0.25f});
      const at::Tensor wide = grad.to(at::kDouble);
      const at::Tensor expected_sum = sum.to(at::kDouble) + wide.square().mean();
      const at::Tensor step = (0.1 / (expected_sum.sqrt() + 1e-10)).to(at::kFloat);
      const at::Tensor expected =
          (param.to(at::kDouble) - wide * step.to(at::kDouble)).to(at::kFloat);
      OptimizerSegment row;
      row.param = param.data_ptr();
      row.grad = grad.data_ptr();
      row.exp_avg_sq = sum.data_ptr();
      row.numel = dim;
      loops.rowwise_adagrad[0](row, adagrad_scalars({0.1, 1e-10}));
      CHECK(most_ulps(sum, expected_sum.to(at::kFloat)) <= 1);
      CHECK(at::allclose(param, expected, 2e-7, 1e-9));
    }
  }
  // Other dtypes are converted whole, also where a row is longer than a buffer.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::ScalarType computed = optimizer_state_dtype(dtype);
    at::Tensor param = magnitudes({1003}, at::kFloat, 1).to(dtype);
    at::Tensor grad = magnitudes({1003}, at::kFloat, 2);
    at::Tensor sum = at::zeros({1}, computed);
    const at::Tensor wide = grad.to(at::kDouble) * 0.5;
    const at::Tensor expected =
        param.to(at::kDouble) - 0.1 * wide / (wide.square().mean().sqrt() + 1e-10);
    OptimizerSegment row;
    row.param = param.data_ptr();
    row.grad = grad.data_ptr();
    row.exp_avg_sq = sum.data_ptr();
    row.numel = 1003;
    step_segment(RowwiseAdagradSpec{.lr = 0.1}, row, {dtype, at::kFloat}, {0.1, 1, 0.5});
    const double rtol = dtype == at::kDouble ? 1e-6 : dtype == at::kHalf ? 1e-3 : 1e-2;
    CHECK(at::allclose(param.to(at::kDouble), expected, rtol, 1e-6));
    CHECK(sum.item<double>() == Approx(wide.square().mean().item<double>()));
  }
}

TEST_CASE("ten steps are those of torch") {
  check_as_torch<torch::optim::SGD>(SgdSpec{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
                                    torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  check_as_torch<torch::optim::SGD>(SgdSpec{.lr = 0.1}, torch::optim::SGDOptions(0.1));
  check_as_torch<torch::optim::Adam>(AdamSpec{.lr = 0.01, .weight_decay = 0.1},
                                     torch::optim::AdamOptions(0.01).weight_decay(0.1));
  check_as_torch<torch::optim::AdamW>(AdamWSpec{.lr = 0.01},
                                      torch::optim::AdamWOptions(0.01).weight_decay(0.01));
  check_as_torch<torch::optim::Adagrad>(AdagradSpec{.lr = 0.1}, torch::optim::AdagradOptions(0.1));
}

TEST_CASE("16-bit values are stepped in fp32, and rounded once") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    at::Tensor param = magnitudes({kNumel}, at::kFloat, 1).clamp(-100, 100).to(dtype);
    const at::Tensor grad = gradient(1).clamp(-100, 100);
    at::Tensor wide = param.to(at::kFloat);
    at::Tensor sum = at::zeros({kNumel}), wide_sum = at::zeros({kNumel});
    for (const auto& [values, states] : {std::pair(param, sum), std::pair(wide, wide_sum)}) {
      OptimizerSegment segment;
      segment.param = values.data_ptr();
      segment.grad = grad.data_ptr();
      segment.exp_avg_sq = states.data_ptr();
      segment.numel = kNumel;
      step_segment(AdagradSpec{}, segment, {values.scalar_type(), at::kFloat}, {0.1, 1, 1});
    }
    CHECK(at::equal(param, wide.to(dtype)));
    CHECK(at::equal(sum, wide_sum));
  }
}

TEST_CASE("gradients are multiplied on their way in; a sum adds them") {
  for (const OptimizerSpec& spec :
       {OptimizerSpec(SgdSpec{}), OptimizerSpec(AdamSpec{}), OptimizerSpec(AdagradSpec{})}) {
    Stepped scaled, plain;
    scaled.step(spec, 1, gradient(3), 0.5);
    plain.step(spec, 1, gradient(3) * 0.5);
    CHECK(at::equal(scaled.param, plain.param));
  }
  Stepped sum;
  const at::Tensor before = sum.param.clone();
  sum.step(SumSpec{}, 1, gradient(3), 2);
  CHECK(at::equal(sum.param, before + 2 * gradient(3)));
}

TEST_CASE("specs have texts, states and limits") {
  CHECK(to_string(SgdSpec{.lr = 0.1}) == "SGD(lr=0.1, momentum=0, weight_decay=0)");
  CHECK(to_string(AdagradSpec{.lr = 1.0 / 3}) == "Adagrad(lr=0.33333333333333331, eps=1e-10)");
  CHECK(to_string(SumSpec{}) == "Sum()");
  CHECK(count_states(SgdSpec{}) == 0);
  CHECK(count_states(SgdSpec{.momentum = 0.5}) == 1);
  CHECK(count_states(AdamWSpec{}) == 2);
  CHECK(count_states(AdagradSpec{}) == 1);
  CHECK(count_states(SumSpec{}) == 0);
  CHECK(learning_rate_of(SumSpec{}) == 1);
  CHECK(complaint_about(AdamSpec{}).empty());
  CHECK_THAT(complaint_about(AdamSpec{.beta2 = 1}), Catch::Contains("expected beta2 in [0, 1)"));
  CHECK_THAT(complaint_about(AdagradSpec{.eps = -1}), Catch::Contains("expected eps >= 0"));
  CHECK_THAT(complaint_about(SgdSpec{.lr = std::nan("")}), Catch::Contains("expected lr >= 0"));
}

}  // namespace trireme::optimizer_spec_test
