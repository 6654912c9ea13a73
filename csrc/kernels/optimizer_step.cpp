#include <trireme/kernels/optimizer_step.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/kernels/optimizer_by_aten.h>
#include <trireme/kernels/optimizer_math.h>
#include <trireme/kernels/optimizer_rows.h>
#include <trireme/kernels/optimizer_step_cuda.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/eq.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

AdamScalars adam_scalars(const AdamStepOptions& options, double step) {
  const bool decoupled = options.decoupled_weight_decay;
  AdamScalars scalars = {};
  scalars.lr = options.lr;
  scalars.beta1 = options.beta1;
  scalars.beta2 = options.beta2;
  scalars.eps = options.eps;
  scalars.grad_factor = 1;
  scalars.grad_sign = options.maximize ? -1 : 1;
  scalars.shrink = decoupled ? 1 - options.lr * options.weight_decay : 1;
  scalars.l2 = decoupled ? 0 : options.weight_decay;
  scalars.amsgrad = options.amsgrad;
  set_step(scalars, step);
  return scalars;
}

SgdScalars sgd_scalars(const SgdStepOptions& options) {
  SgdScalars scalars = {};
  scalars.lr = options.lr;
  scalars.grad_factor = 1;
  scalars.grad_sign = options.maximize ? -1 : 1;
  scalars.l2 = options.weight_decay;
  scalars.momentum = options.momentum;
  scalars.buffer_share = options.first_step ? 0 : options.momentum;
  scalars.grad_share = options.first_step ? 1 : 1 - options.dampening;
  scalars.nesterov = options.nesterov;
  return scalars;
}

AdagradScalars adagrad_scalars(const AdagradStepOptions& options) {
  return {options.lr, options.eps, /*grad_factor=*/1, /*write_grad=*/false};
}

namespace {

enum class Route : uint8_t { kCpu, kCuda, kAten };

bool is_subclass(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

Route route_of(const OptimizerRow& row) {
  if (is_subclass(row.param) || is_subclass(row.grad)) return Route::kAten;
  if (row.param.is_cpu()) return Route::kCpu;
  return row.param.is_cuda() && cuda::can_step(row.param.device()) ? Route::kCuda : Route::kAten;
}

void check_length(std::string_view area, const char* name, size_t got, size_t expected) {
  TORCH_CHECK_VALUE(
      got == expected,
      error_text(area,
                 std::string("got ") + std::to_string(got) + " " + name + ", expected " +
                     std::to_string(expected) + " as there are parameters",
                 {}, "Pass one for each."));
}

void bump_if_counted(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// --- what differs between the optimizers ---------------------------------------------------------

struct Adam {
  static constexpr std::string_view kArea = "adam_step";
  const AdamLists& lists;
  const AdamStepOptions& options;

  void check_lengths() const {
    const size_t count = lists.params.size();
    check_length(kArea, "gradients", lists.grads.size(), count);
    check_length(kArea, "exp_avgs", lists.exp_avgs.size(), count);
    check_length(kArea, "exp_avg_sqs", lists.exp_avg_sqs.size(), count);
    if (options.amsgrad) {
      check_length(kArea, "max_exp_avg_sqs", lists.max_exp_avg_sqs.size(), count);
    }
    check_length(kArea, "steps", lists.steps.size() + lists.step_numbers.size(), count);
  }
  OptimizerRow row(size_t i) const {
    return {lists.params[i],
            lists.grads[i],
            {&lists.exp_avgs[i], &lists.exp_avg_sqs[i],
             options.amsgrad ? &lists.max_exp_avg_sqs[i] : nullptr}};
  }
  const at::Tensor* counter(size_t i) const {
    return lists.steps.empty() ? nullptr : &lists.steps[i];
  }
  double number(size_t i) const { return static_cast<double>(lists.step_numbers[i]); }
  AdamScalars scalars(double step) const { return adam_scalars(options, step); }
};

struct Sgd {
  static constexpr std::string_view kArea = "sgd_step";
  const SgdLists& lists;
  const SgdStepOptions& options;

  void check_lengths() const {
    const size_t count = lists.params.size();
    check_length(kArea, "gradients", lists.grads.size(), count);
    if (options.momentum != 0) {
      check_length(kArea, "momentum_buffers", lists.momentum_buffers.size(), count);
    }
  }
  OptimizerRow row(size_t i) const {
    const bool momentum = options.momentum != 0;
    return {lists.params[i],
            lists.grads[i],
            {momentum ? &lists.momentum_buffers[i] : nullptr, nullptr, nullptr}};
  }
  const at::Tensor* counter(size_t) const { return nullptr; }
  double number(size_t) const { return 0; }
  SgdScalars scalars(double) const { return sgd_scalars(options); }
};

void run_on_cpu(const OptimizerBatch& batch, const AdamScalars& scalars) {
  adam_segments(batch.segments, batch.dtypes, scalars);
}
void run_on_cpu(const OptimizerBatch& batch, const SgdScalars& scalars) {
  sgd_segments(batch.segments, batch.dtypes, scalars);
}

// --- what they share -----------------------------------------------------------------------------

// GradScale as the host sees it; reading it waits for the device that holds it.
struct HostScale {
  double factor = 1;
  bool write_grad = false;
  bool skip = false;
};

HostScale read(const GradScale& scale) {
  HostScale host = {scale.factor, scale.grad_scale.defined(), false};
  if (host.write_grad) host.factor /= scale.grad_scale.item<double>();
  if (scale.found_inf.defined()) host.skip = scale.found_inf.item<double>() != 0;
  return host;
}

// Counts one more step on a counter of the host, or on one that needs ATen.
double count_up(const at::Tensor& counter) {
  if (counter.is_cpu() && counter.scalar_type() == at::kFloat && counter.numel() == 1) {
    bump_if_counted(counter);
    return *counter.data_ptr<float>() += 1;
  }
  counter.add_(1);
  return counter.item<double>();
}

bool counts_on_device(const at::Tensor& counter, const at::Tensor& param) {
  return counter.is_cuda() && counter.device() == param.device() &&
         counter.scalar_type() == at::kFloat;
}

template <typename Algorithm>
class Step {
 public:
  Step(Algorithm algorithm, const GradScale& scale)
      : algorithm_(std::move(algorithm)), scale_(scale), write_grad_(scale.grad_scale.defined()) {}

  void run() {
    const size_t count = algorithm_.lists.params.size();
    algorithm_.check_lengths();
    for (size_t i = 0; i < count; ++i) check_row(Algorithm::kArea, i, algorithm_.row(i));
    for (size_t i = 0; i < count; ++i) take_row(i);
    count_up_on_devices();
    for (const OptimizerBatch& batch : batches_) launch(batch);
    rows_.finish();
  }

 private:
  void take_row(size_t i) {
    const OptimizerRow row = algorithm_.row(i);
    const at::Tensor* counter = algorithm_.counter(i);
    const Route route = route_of(row);
    const float* device_counter = nullptr;
    double step = 0;
    if (route == Route::kCuda && counter != nullptr && counts_on_device(*counter, row.param)) {
      device_counter = counter->data_ptr<float>();
      counters_.push_back(*counter);
    } else if (route == Route::kCuda && counter == nullptr) {
      step = algorithm_.number(i);
    } else {
      if (host_scale().skip) return;
      step = counter == nullptr ? algorithm_.number(i) : count_up(*counter);
    }
    written(row);
    if (route == Route::kAten) return by_aten::step(row, host_scalars(step));
    OptimizerBatch& batch = batch_of(row, step, device_counter != nullptr);
    batch.segments.push_back(rows_.segment_of(row, write_grad_));
    if (device_counter != nullptr) batch.counters.push_back(device_counter);
  }

  const HostScale& host_scale() {
    if (!host_scale_) host_scale_ = read(scale_);
    return *host_scale_;
  }

  auto host_scalars(double step) {
    auto scalars = algorithm_.scalars(step);
    scalars.grad_factor = host_scale().factor;
    scalars.write_grad = write_grad_;
    return scalars;
  }

  void written(const OptimizerRow& row) const {
    bump_if_counted(row.param);
    if (write_grad_) bump_if_counted(row.grad);
    for (const at::Tensor* state : row.states) {
      if (state != nullptr) bump_if_counted(*state);
    }
  }

  OptimizerBatch& batch_of(const OptimizerRow& row, double step, bool counted) {
    const SegmentDtypes dtypes = {c10::toRealValueType(row.param.scalar_type()),
                                  c10::toRealValueType(row.grad.scalar_type())};
    const auto fits = [&](const OptimizerBatch& batch) {
      return batch.dtypes == dtypes && batch.step == step && batch.device == row.param.device() &&
             batch.counters.empty() != counted;
    };
    if (!batches_.empty() && fits(batches_.back())) return batches_.back();
    for (OptimizerBatch& batch : batches_) {
      if (fits(batch)) return batch;
    }
    batches_.push_back({row.param.device(), dtypes, step, {}, {}});
    return batches_.back();
  }

  // Counts steps before the kernels read them. If found_inf stops the kernels, counts nothing
  // either.
  void count_up_on_devices() {
    if (counters_.empty()) return;
    if (!scale_.found_inf.defined()) return at::_foreach_add_(counters_, 1);
    std::vector<at::Tensor> counts;
    for (const at::Tensor& counter : counters_) {
      counts.push_back(scale_.found_inf.to(counter.device()).eq(0).to(at::kFloat));
    }
    at::_foreach_add_(counters_, counts);
  }

  void launch(const OptimizerBatch& batch) {
    if (batch.device.is_cpu()) return run_on_cpu(batch, host_scalars(batch.step));
    auto scalars = algorithm_.scalars(batch.step);
    scalars.grad_factor = scale_.factor;
    scalars.write_grad = write_grad_;
    cuda::step(batch, scalars, scale_);
  }

  const Algorithm algorithm_;
  const GradScale& scale_;
  const bool write_grad_;
  std::optional<HostScale> host_scale_;
  DenseRows rows_;
  std::vector<OptimizerBatch> batches_;
  std::vector<at::Tensor> counters_;  // on devices
};

}  // namespace

void adam_step(const AdamLists& lists, const AdamStepOptions& options, const GradScale& scale) {
  TRIREME_TRACE("flat_optimizer");
  const at::NoGradGuard no_grad;
  Step(Adam{lists, options}, scale).run();
}

void sgd_step(const SgdLists& lists, const SgdStepOptions& options, const GradScale& scale) {
  TRIREME_TRACE("flat_optimizer");
  const at::NoGradGuard no_grad;
  Step(Sgd{lists, options}, scale).run();
}

}  // namespace trireme
