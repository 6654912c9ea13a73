// Lists of tensors: against torch's own fused optimizers, and what optimizer_step.h promises of
// them.

#include <trireme/kernels/optimizer_step.h>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

#include <string>

#include "catch_torch.h"
#include "kernels/optimizer_reference.h"

namespace trireme::optimizer_lists_test {

namespace {

using reference::adam_options;
using reference::AdamTensors;
using reference::magnitudes;
using reference::sgd_options;
using reference::text_of;

// How many elements torch's vectors of 32 bytes take; the rest its scalar loop rounds otherwise.
int64_t in_vectors(const at::Tensor& tensor) {
  const auto width = static_cast<int64_t>(32 / tensor.element_size());
  return tensor.numel() / width * width;
}

bool same_but_for_the_tail(const at::Tensor& got, const at::Tensor& expected) {
  const int64_t numel = in_vectors(expected);
  const at::Tensor a = got.reshape({-1});
  const at::Tensor b = expected.reshape({-1});
  const double rounding = expected.scalar_type() == at::kDouble ? 1e-14 : 1e-6;
  return at::equal(a.narrow(0, 0, numel), b.narrow(0, 0, numel)) &&
         at::allclose(a.narrow(0, numel, a.numel() - numel), b.narrow(0, numel, a.numel() - numel),
                      rounding, rounding);
}

void torch_adam(AdamTensors& t, const AdamStepOptions& o) {
  for (const at::Tensor& step : t.steps) step.add_(1);
  const auto top = o.amsgrad ? t.max_exp_avg_sqs : std::vector<at::Tensor>();
  const auto fused = [&](auto op) {
    op(t.params, t.grads, t.exp_avgs, t.exp_avg_sqs, top, t.steps, o.lr, o.beta1, o.beta2,
       o.weight_decay, o.eps, o.amsgrad, o.maximize, std::nullopt, std::nullopt);
  };
  if (o.decoupled_weight_decay) {
    fused([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    fused([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

const std::vector<std::vector<int64_t>> kShapes = {{1}, {7}, {64}, {33, 65}, {0, 3}, {300, 301}};

}  // namespace

TEST_CASE("twelve steps of Adam and AdamW have the bits of torch's fused ones") {
  const reference::ThreeThreads threads;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const AdamStepOptions& options : adam_options()) {
      INFO(dtype << ", " << text_of(options));
      AdamTensors ours(kShapes, dtype);
      AdamTensors torch = ours.clone();
      for (uint64_t k = 0; k < 12; ++k) {
        ours.draw_grads(100 * k);
        torch.draw_grads(100 * k);
        ours.step(options);
        torch_adam(torch, options);
      }
      for (size_t i = 0; i < kShapes.size(); ++i) {
        INFO("shape " << at::IntArrayRef(kShapes[i]));
        CHECK(same_but_for_the_tail(ours.params[i], torch.params[i]));
        CHECK(same_but_for_the_tail(ours.exp_avgs[i], torch.exp_avgs[i]));
        CHECK(same_but_for_the_tail(ours.exp_avg_sqs[i], torch.exp_avg_sqs[i]));
        CHECK(same_but_for_the_tail(ours.max_exp_avg_sqs[i], torch.max_exp_avg_sqs[i]));
        CHECK(at::equal(ours.steps[i], torch.steps[i]));
      }
    }
  }
}

TEST_CASE("twelve steps of SGD have the bits of torch's fused one") {
  const reference::ThreeThreads threads;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (SgdStepOptions options : sgd_options()) {
      INFO(dtype << ", " << text_of(options));
      AdamTensors ours(kShapes, dtype);
      AdamTensors torch = ours.clone();
      const bool momentum = options.momentum != 0;
      for (uint64_t k = 0; k < 12; ++k) {
        ours.draw_grads(100 * k);
        torch.draw_grads(100 * k);
        options.first_step = k == 0;
        sgd_step({ours.params, ours.grads, momentum ? ours.exp_avgs : at::TensorList()}, options);
        at::_fused_sgd_(torch.params, torch.grads, momentum ? torch.exp_avgs : at::TensorList(),
                        options.weight_decay, options.momentum, options.lr, options.dampening,
                        options.nesterov, options.maximize, k == 0, std::nullopt, std::nullopt);
      }
      for (size_t i = 0; i < kShapes.size(); ++i) {
        INFO("shape " << at::IntArrayRef(kShapes[i]));
        CHECK(same_but_for_the_tail(ours.params[i], torch.params[i]));
        CHECK(same_but_for_the_tail(ours.exp_avgs[i], torch.exp_avgs[i]));
      }
    }
  }
}

TEST_CASE("dtypes and step counts may differ within a list") {
  AdamTensors mixed({{70}, {50}}, at::kFloat);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kFloat}) {
    mixed.add(magnitudes({90}, dtype, 5));
  }
  mixed.steps[1].fill_(4);
  mixed.steps[3] = at::full({}, 9, at::kDouble);
  mixed.draw_grads(3);
  const AdamTensors before = mixed.clone();
  AdamStepOptions options;
  mixed.step(options);
  const std::vector<double> steps = {1, 5, 1, 10, 1};
  for (size_t i = 0; i < steps.size(); ++i) {
    INFO("parameter " << i);
    const at::ScalarType dtype = before.params[i].scalar_type();
    adam_segment(
        {before.params[i].data_ptr(), before.grads[i].data_ptr(), before.exp_avgs[i].data_ptr(),
         before.exp_avg_sqs[i].data_ptr(), nullptr, before.params[i].numel()},
        {dtype, dtype}, adam_scalars(options, steps[i]));
    CHECK(at::equal(mixed.params[i], before.params[i]));
    CHECK(mixed.steps[i].item<double>() == steps[i]);
  }
}

TEST_CASE("memory in any order is stepped where it lies") {
  const at::Tensor storage = magnitudes({6, 40}, at::kFloat, 1);
  AdamTensors odd;
  odd.add(magnitudes({2, 3, 4, 5}, at::kFloat, 2).contiguous(at::MemoryFormat::ChannelsLast));
  odd.add(magnitudes({30, 20}, at::kFloat, 3).t());
  odd.add(storage.slice(1, 0, 40, 2));  // not dense
  odd.add(at::view_as_complex(magnitudes({21, 2}, at::kFloat, 4)));
  odd.draw_grads(5);
  odd.grads[0] = odd.grads[0].contiguous();
  odd.grads[1] = magnitudes({1}, at::kFloat, 6).expand({20, 30});
  odd.grads[3] = odd.grads[3].conj();
  odd.exp_avgs[1] = odd.exp_avgs[1].contiguous();
  AdamTensors plain = odd.clone();
  for (auto list : {&AdamTensors::params, &AdamTensors::grads, &AdamTensors::exp_avgs,
                    &AdamTensors::exp_avg_sqs, &AdamTensors::max_exp_avg_sqs}) {
    for (at::Tensor& tensor : plain.*list) {
      tensor = tensor.resolve_conj();
      if (tensor.is_complex()) tensor = at::view_as_real(tensor);
      tensor = tensor.contiguous();
    }
  }
  const at::Tensor between = storage.slice(1, 1, 40, 2).clone();
  for (int k = 0; k < 2; ++k) {
    odd.step({});
    plain.step({});
  }
  for (size_t i = 0; i < odd.params.size(); ++i) {
    INFO("parameter " << i);
    const bool complex = odd.params[i].is_complex();
    CHECK(at::equal(complex ? at::view_as_real(odd.params[i]) : odd.params[i], plain.params[i]));
    CHECK(at::equal(complex ? at::view_as_real(odd.exp_avgs[i]) : odd.exp_avgs[i],
                    plain.exp_avgs[i]));
  }
  CHECK(at::equal(storage.slice(1, 1, 40, 2), between));
}

TEST_CASE("gradients are scaled on their way in") {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    INFO(dtype);
    AdamTensors scaled({{1000}}, dtype);
    scaled.draw_grads(4);
    AdamTensors plain = scaled.clone();
    AdamTensors clipped = scaled.clone();
    const at::Tensor given = scaled.grads[0].clone();

    plain.grads[0] = plain.grads[0].to(at::kFloat) / 8;
    scaled.step({}, {1, at::full({}, 8.0), at::zeros({})});
    plain.step({});
    CHECK(at::equal(scaled.params[0], plain.params[0]));
    CHECK(at::equal(scaled.grads[0], plain.grads[0].to(dtype)));  // GradScaler leaves it so

    clipped.step({}, {0.125, {}, {}});
    CHECK(at::equal(clipped.params[0], plain.params[0]));
    CHECK(at::equal(clipped.grads[0], given));
  }
}

TEST_CASE("an infinite gradient stops the step, its count too") {
  AdamTensors tensors({{10}}, at::kFloat);
  tensors.draw_grads(4);
  const AdamTensors before = tensors.clone();
  tensors.step({}, {1, at::full({}, 8.0), at::ones({1})});
  CHECK(at::equal(tensors.params[0], before.params[0]));
  CHECK(at::equal(tensors.grads[0], before.grads[0]));
  CHECK(tensors.steps[0].item<float>() == 0);
}

TEST_CASE("parameters, states and counts that are written have their version moved") {
  AdamTensors tensors({{10}}, at::kFloat);
  const auto version = [](const std::vector<at::Tensor>& list) { return list[0]._version(); };
  const int64_t grad = version(tensors.grads);
  const int64_t param = version(tensors.params);
  const int64_t state = version(tensors.exp_avg_sqs);
  const int64_t step = version(tensors.steps);
  tensors.step({});
  CHECK(version(tensors.grads) == grad);
  CHECK(version(tensors.params) == param + 1);
  CHECK(version(tensors.exp_avg_sqs) == state + 1);
  CHECK(version(tensors.steps) == step + 1);
  tensors.step({}, {1, at::ones({}), {}});
  CHECK(version(tensors.grads) == grad + 1);
}

TEST_CASE("what cannot be stepped is refused by name, and nothing is written") {
  AdamTensors tensors({{4}, {5}}, at::kFloat);
  tensors.draw_grads(1);
  const AdamTensors good = tensors.clone();
  const auto refused = [&](const std::string& text) {
    CHECK_THROWS_WITH(tensors.step({}), Catch::Contains("[adam_step] " + text));
    CHECK(at::equal(tensors.params[0], good.params[0]));
    tensors = good.clone();
  };
  tensors.grads[1] = at::ones({5}).to_sparse();
  refused(
      "got a gradient of layout Sparse for parameter 1, expected a strided one. Use "
      "torch.optim.SparseAdam or torch.optim.SGD for it.");
  tensors.grads[1] = at::ones({5}, at::kDouble);
  refused("got a gradient of dtype Double for parameter 1 of dtype Float, expected Float. Convert");
  tensors.params[1] = at::ones({5}, at::kInt);
  refused("got dtype Int and layout Strided for parameter 1, expected a strided float32,");
  tensors.exp_avgs[1] = at::zeros({5}, at::kBFloat16);
  refused("got a state of dtype BFloat16 for parameter 1 of dtype Float, expected Float");
  tensors.exp_avg_sqs[1] = at::zeros({6});
  refused(
      "got a state of shape [6] for parameter 1, expected [5]. Load a state of the same model.");
  tensors.exp_avgs[1] = at::zeros({5}, at::kMeta);
  refused("got a state on meta for parameter 1, expected cpu");
  tensors.steps.pop_back();
  refused("got 1 steps, expected 2 as there are parameters");
  CHECK_THROWS_AS(sgd_step({tensors.params, {}, {}}, {}), c10::ValueError);
}

}  // namespace trireme::optimizer_lists_test
