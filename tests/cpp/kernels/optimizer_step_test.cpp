// The loops against a plain reference, segments against whole tensors, ATen's way against the
// kernels.

#include <trireme/kernels/optimizer_step.h>

#include <trireme/kernels/cpu/optimizer_loops.h>
#include <trireme/kernels/optimizer_by_aten.h>

#include <limits>

#include "catch_torch.h"
#include "kernels/optimizer_reference.h"

namespace trireme::optimizer_step_test {

namespace {

using reference::adam_options;
using reference::AdamTensors;
using reference::magnitudes;
using reference::sgd_options;
using reference::text_of;

constexpr int64_t kLengths[] = {0, 1, 7, 8, 16, 33, 64, 515};

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
    by_aten::step({other.params[0],
                   other.grads[0],
                   {momentum ? &other.exp_avgs[0] : nullptr, nullptr, nullptr}},
                  sgd_scalars(options));
    CHECK(at::allclose(ours.params[0], other.params[0], 1e-5));
    CHECK(at::allclose(ours.exp_avgs[0], other.exp_avgs[0], 1e-5));
  }
}

}  // namespace trireme::optimizer_step_test
