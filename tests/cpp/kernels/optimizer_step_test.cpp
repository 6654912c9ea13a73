// The kernels against a plain reference, and lists of tensors against torch's own fused optimizers.

#include <trireme/kernels/cpu/optimizer_loops.h>
#include <trireme/kernels/optimizer_by_aten.h>
#include <trireme/kernels/optimizer_step.h>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <algorithm>
#include <sstream>
#include <string>

#include "catch_torch.h"
#include "kernels/optimizer_reference.h"

namespace {

using namespace trireme;
using reference::AdamTensors;
using reference::magnitudes;

constexpr int64_t kLengths[] = {0, 1, 7, 8, 16, 33, 64, 515};

// Every combination of what has a loop of its own, and both ends of the lerp.
std::vector<AdamStepOptions> adam_options() {
  std::vector<AdamStepOptions> all;
  for (const bool amsgrad : {false, true}) {
    for (const bool maximize : {false, true}) {
      for (const double weight_decay : {0.0, 0.1}) {
        for (const bool decoupled : {false, true}) {
          for (const double beta1 : {0.9, 0.3}) {
            all.push_back(
                {1e-2, beta1, 0.99, 1e-8, weight_decay, decoupled, amsgrad, maximize});
          }
        }
      }
    }
  }
  return all;
}

std::vector<SgdStepOptions> sgd_options() {
  std::vector<SgdStepOptions> all;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool maximize : {false, true}) {
      all.push_back({1e-2, 0, 0, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0.3, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0, weight_decay, true, maximize, false});
    }
  }
  return all;
}

std::string text_of(const AdamStepOptions& o) {
  std::ostringstream out;
  out << "beta1 " << o.beta1 << ", weight decay " << o.weight_decay
      << (o.decoupled_weight_decay ? ", decoupled" : "") << (o.amsgrad ? ", amsgrad" : "")
      << (o.maximize ? ", maximize" : "");
  return out.str();
}

std::string text_of(const SgdStepOptions& o) {
  std::ostringstream out;
  out << "momentum " << o.momentum << ", dampening " << o.dampening << ", weight decay "
      << o.weight_decay << (o.nesterov ? ", nesterov" : "") << (o.maximize ? ", maximize" : "");
  return out.str();
}

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
         at::allclose(a.narrow(0, numel, a.numel() - numel),
                      b.narrow(0, numel, a.numel() - numel), rounding, rounding);
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

template <typename T>
void check_adam_loop(const cpu::OptimizerLoops& loops, size_t type, int64_t numel,
                     const AdamStepOptions& options) {
  const at::ScalarType dtype = type == 0 ? at::kFloat : at::kDouble;
  const AdamScalars scalars = adam_scalars(options, 3);
  const at::Tensor param = magnitudes({numel}, dtype, 1);
  const at::Tensor grad = magnitudes({numel}, dtype, 2);
  const at::Tensor avg = magnitudes({numel}, dtype, 3);
  const at::Tensor sq = magnitudes({numel}, dtype, 4).abs_();
  const at::Tensor top = magnitudes({numel}, dtype, 5).abs_();
  std::vector<reference::AdamState<T>> expected(static_cast<size_t>(numel));
  for (int64_t i = 0; i < numel; ++i) {
    auto& e = expected[static_cast<size_t>(i)];
    e = {param.data_ptr<T>()[i], avg.data_ptr<T>()[i], sq.data_ptr<T>()[i], top.data_ptr<T>()[i]};
    reference::adam(e, grad.data_ptr<T>()[i], scalars, loops.fuses);
  }
  loops.adam[type]({param.data_ptr(), grad.data_ptr(), avg.data_ptr(), sq.data_ptr(),
                    options.amsgrad ? top.data_ptr() : nullptr, numel},
                   scalars);
  int64_t wrong = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const auto& e = expected[static_cast<size_t>(i)];
    wrong += param.data_ptr<T>()[i] != e.param || avg.data_ptr<T>()[i] != e.exp_avg ||
             sq.data_ptr<T>()[i] != e.exp_avg_sq || top.data_ptr<T>()[i] != e.max_exp_avg_sq;
  }
  CHECK(wrong == 0);
}

template <typename T>
void check_sgd_loop(const cpu::OptimizerLoops& loops, size_t type, int64_t numel,
                    const SgdStepOptions& options) {
  const at::ScalarType dtype = type == 0 ? at::kFloat : at::kDouble;
  const SgdScalars scalars = sgd_scalars(options);
  const at::Tensor param = magnitudes({numel}, dtype, 1);
  const at::Tensor grad = magnitudes({numel}, dtype, 2);
  const at::Tensor buffer = magnitudes({numel}, dtype, 3);
  const at::Tensor expected = param.clone();
  const at::Tensor expected_buffer = buffer.clone();
  const bool momentum = options.momentum != 0;
  for (int64_t i = 0; i < numel; ++i) {
    reference::sgd(expected.data_ptr<T>()[i], grad.data_ptr<T>()[i],
                   momentum ? expected_buffer.data_ptr<T>() + i : nullptr, scalars, loops.fuses);
  }
  loops.sgd[type]({param.data_ptr(), grad.data_ptr(), momentum ? buffer.data_ptr() : nullptr,
                   nullptr, nullptr, numel},
                  scalars);
  CHECK(at::equal(param, expected));
  CHECK(at::equal(buffer, expected_buffer));
}

}  // namespace

TEST_CASE("every instruction set steps as the reference does") {
  for (const cpu::OptimizerLoops& loops : cpu::supported_optimizer_loops()) {
    for (const int64_t numel : kLengths) {
      for (const AdamStepOptions& options : adam_options()) {
        INFO(loops.isa << ", " << numel << " elements, " << text_of(options));
        check_adam_loop<float>(loops, 0, numel, options);
        check_adam_loop<double>(loops, 1, numel, options);
      }
      for (const SgdStepOptions& options : sgd_options()) {
        INFO(loops.isa << ", " << numel << " elements, " << text_of(options));
        check_sgd_loop<float>(loops, 0, numel, options);
        check_sgd_loop<double>(loops, 1, numel, options);
      }
    }
  }
}

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

TEST_CASE("half precision is computed with in fp32 and rounded once") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool float_grads : {false, true}) {
      INFO(dtype << (float_grads ? ", fp32 gradients" : ""));
      AdamTensors half({{1000}, {3, 700}}, dtype);
      half.draw_grads(7);
      if (float_grads) {
        for (at::Tensor& grad : half.grads) grad = magnitudes(grad.sizes(), at::kFloat, 8);
      }
      AdamTensors single = half.clone();
      for (at::Tensor& param : single.params) param = param.to(at::kFloat);
      for (at::Tensor& grad : single.grads) grad = grad.to(at::kFloat);
      AdamStepOptions options;
      options.weight_decay = 0.1;
      for (int k = 0; k < 3; ++k) {
        half.step(options);
        single.step(options);
        for (size_t i = 0; i < half.params.size(); ++i) {
          CHECK(at::equal(half.params[i], single.params[i].to(dtype)));
          CHECK(at::equal(half.exp_avgs[i], single.exp_avgs[i]));
          CHECK(at::equal(half.exp_avg_sqs[i], single.exp_avg_sqs[i]));
          single.params[i].copy_(half.params[i]);
        }
      }
    }
  }
}

TEST_CASE("a list cut into segments is stepped to the same bits") {
  const reference::ThreeThreads threads;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    INFO(dtype);
    AdamTensors whole({{100000}}, dtype);
    whole.draw_grads(9);
    const AdamTensors cut = whole.clone();
    AdamStepOptions options;
    options.decoupled_weight_decay = options.amsgrad = true;
    options.weight_decay = 0.1;
    whole.step(options);
    const OptimizerSegment all = {cut.params[0].data_ptr(),          cut.grads[0].data_ptr(),
                                  cut.exp_avgs[0].data_ptr(),        cut.exp_avg_sqs[0].data_ptr(),
                                  cut.max_exp_avg_sqs[0].data_ptr(), 100000};
    const SegmentDtypes dtypes = {dtype, dtype};
    const AdamScalars scalars = adam_scalars(options, 1);
    const std::vector<OptimizerSegment> segments = {
        slice(all, dtypes, 0, 1), slice(all, dtypes, 1, 1), slice(all, dtypes, 1, 40000),
        slice(all, dtypes, 40000, 99990)};
    adam_segments(segments, dtypes, scalars);
    adam_segment(slice(all, dtypes, 99990, 100000), dtypes, scalars);
    CHECK(at::equal(cut.params[0], whole.params[0]));
    CHECK(at::equal(cut.exp_avgs[0], whole.exp_avgs[0]));
    CHECK(at::equal(cut.max_exp_avg_sqs[0], whole.max_exp_avg_sqs[0]));
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
    adam_segment({before.params[i].data_ptr(), before.grads[i].data_ptr(),
                  before.exp_avgs[i].data_ptr(), before.exp_avg_sqs[i].data_ptr(), nullptr,
                  before.params[i].numel()},
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
    CHECK(at::equal(scaled.grads[0], plain.grads[0].to(dtype)));  // as GradScaler leaves it

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

TEST_CASE("an infinite parameter stays infinite, a NaN shows") {
  AdamTensors tensors({{20}}, at::kFloat);
  tensors.draw_grads(4);
  tensors.params[0][3] = -std::numeric_limits<float>::infinity();
  tensors.grads[0][3] = 0;
  tensors.grads[0][5] = std::numeric_limits<float>::quiet_NaN();
  AdamStepOptions options;
  options.amsgrad = true;
  tensors.step(options);
  tensors.draw_grads(6);
  tensors.step(options);
  CHECK(tensors.params[0][3].item<float>() == -std::numeric_limits<float>::infinity());
  CHECK(tensors.params[0].isnan().sum().item<int64_t>() == 1);
  CHECK(tensors.max_exp_avg_sqs[0].isnan().sum().item<int64_t>() == 1);
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

TEST_CASE("ATen's operators come to the same but for rounding") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
    for (const AdamStepOptions& options : adam_options()) {
      INFO(dtype << ", " << text_of(options));
      AdamTensors ours;
      ours.add(magnitudes({300}, c10::toRealValueType(dtype), 1).to(dtype));
      ours.draw_grads(2);
      const AdamTensors other = ours.clone();
      AdamScalars scalars = adam_scalars(options, 1);
      scalars.grad_factor = 0.5;
      scalars.write_grad = true;
      ours.step(options, {1, at::full({}, 2.0), {}});
      by_aten::step({other.params[0],
                     other.grads[0],
                     {&other.exp_avgs[0], &other.exp_avg_sqs[0], &other.max_exp_avg_sqs[0]}},
                    scalars);
      CHECK(at::allclose(ours.params[0], other.params[0], 1e-2 * (dtype == at::kBFloat16) + 1e-5));
      CHECK(at::allclose(ours.exp_avgs[0], other.exp_avgs[0], 1e-5));
      CHECK(at::equal(ours.grads[0], other.grads[0]));
    }
  }
  for (const SgdStepOptions& options : sgd_options()) {
    INFO(text_of(options));
    AdamTensors ours({{300}}, at::kFloat);
    ours.draw_grads(2);
    const AdamTensors other = ours.clone();
    const bool momentum = options.momentum != 0;
    sgd_step({ours.params, ours.grads, momentum ? ours.exp_avgs : at::TensorList()}, options);
    by_aten::step(
        {other.params[0], other.grads[0], {momentum ? &other.exp_avgs[0] : nullptr, nullptr, nullptr}},
        sgd_scalars(options));
    CHECK(at::allclose(ours.params[0], other.params[0], 1e-5));
    CHECK(at::allclose(ours.exp_avgs[0], other.exp_avgs[0], 1e-5));
  }
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
  refused("got a gradient of layout Sparse for parameter 1, expected a strided one. Use "
          "torch.optim.SparseAdam or torch.optim.SGD for it.");
  tensors.grads[1] = at::ones({5}, at::kDouble);
  refused("got a gradient of dtype Double for parameter 1 of dtype Float, expected Float. Convert");
  tensors.params[1] = at::ones({5}, at::kInt);
  refused("got dtype Int and layout Strided for parameter 1, expected a strided float32,");
  tensors.exp_avgs[1] = at::zeros({5}, at::kBFloat16);
  refused("got a state of dtype BFloat16 for parameter 1 of dtype Float, expected Float");
  tensors.exp_avg_sqs[1] = at::zeros({6});
  refused("got a state of shape [6] for parameter 1, expected [5]. Load a state of the same model.");
  tensors.exp_avgs[1] = at::zeros({5}, at::kMeta);
  refused("got a state on meta for parameter 1, expected cpu");
  tensors.steps.pop_back();
  refused("got 1 steps, expected 2 as there are parameters");
  CHECK_THROWS_AS(sgd_step({tensors.params, {}, {}}, {}), c10::ValueError);
}
