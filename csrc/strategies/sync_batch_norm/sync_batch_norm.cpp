#include <trireme/strategies/sync_batch_norm/sync_batch_norm.h>

#include <trireme/comm/agree.h>
#include <trireme/common/trace.h>
#include <trireme/strategies/sync_batch_norm/channel_stats.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kArea = "sync_batch_norm";

// Wraps a communicator as an IValue, for an autograd node to keep beside tensors.
struct CommunicatorHolder : torch::CustomClassHolder {
  explicit CommunicatorHolder(std::shared_ptr<Communicator> held) : communicator(std::move(held)) {}
  std::shared_ptr<Communicator> communicator;
};

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.contiguous(tensor.suggest_memory_format());
}

std::string label(const char* what, int64_t channels) {
  return std::string(what) + " of a batch norm of " + std::to_string(channels) + " channels";
}

BatchStats gather_stats(Communicator& communicator, const at::Tensor& input, double eps) {
  const at::Tensor own = local_stats(input);
  const at::Tensor all = at::empty({communicator.world(), own.numel()}, own.options());
  communicator.all_gather({all}, {own}, label("statistics", input.size(1))).wait();
  return combine_stats(all, eps);
}

// Returns whether the batch has any values. Asks the device only where this rank alone cannot tell;
// as all ranks then have too little, all of them throw.
bool has_values(const BatchStats& stats, const at::Tensor& input, RankOf where) {
  if (input.numel() > input.size(1)) return true;
  const auto total = stats.counts.sum().item<double>();
  TORCH_CHECK_VALUE(total != 1, error_text(kArea,
                                           "got 1 value per channel on all ranks together, "
                                           "expected more: its variance is unknown",
                                           where, "Train with a larger batch."));
  return total > 0;
}

// The gradient of a gradient would need collectives of its own.
struct OnceDifferentiable : torch::autograd::Function<OnceDifferentiable> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& gradient, const at::Tensor&,
                            const at::Tensor&) {
    return gradient;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, error_text(kArea, "got a second derivative, expected the first only", {},
                          "Use GroupNorm or LayerNorm where the loss holds gradients."));
  }
};

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  struct Call {
    std::shared_ptr<Communicator> communicator;
    const BatchNormRequest& request;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& any_input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Call& call) {
    TRIREME_TRACE("sync_batch_norm.forward");
    const at::Tensor input = dense(any_input);
    const double eps = call.request.eps;
    const BatchStats stats = gather_stats(*call.communicator, input, eps);
    const bool update = has_values(stats, input, call.communicator->rank_of());
    at::Tensor running_mean = call.request.running_mean;
    at::Tensor running_var = call.request.running_var;
    if (update && running_mean.defined()) {
      update_running_stats(running_mean, running_var, stats, call.request.momentum);
    }
    context->save_for_backward(
        {input, weight.value_or(at::Tensor()), stats.mean, stats.invstd, stats.counts});
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["communicator"] =
        c10::IValue::make_capsule(c10::make_intrusive<CommunicatorHolder>(call.communicator));
    return normalize(input, {weight.value_or(at::Tensor()), bias.value_or(at::Tensor())}, stats,
                     eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TRIREME_TRACE("sync_batch_norm.backward");
    const variable_list saved = context->get_saved_variables();
    variable_list gradients = first_derivative(context, saved, grad_outputs[0]);
    if (at::GradMode::is_enabled()) {
      for (at::Tensor& gradient : gradients) {
        if (gradient.defined()) {
          gradient = OnceDifferentiable::apply(gradient, grad_outputs[0], saved[0]);
        }
      }
    }
    return gradients;
  }

 private:
  static variable_list first_derivative(AutogradContext* context, const variable_list& saved,
                                        const at::Tensor& any_grad_output) {
    const at::NoGradGuard no_grad;
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const BatchStats stats{saved[2], /*var=*/{}, saved[3], saved[4]};
    const at::Tensor grad_output = any_grad_output.contiguous(input.suggest_memory_format());
    const at::Tensor own = gradient_sums(grad_output, input, stats);

    // Sums without asking whether the gradient of the input is wanted: a rank whose (empty) input
    // needs none would be missing where its peers wait.
    const at::Tensor sums = own.clone();
    communicator_of(context)
        .all_reduce({sums}, ReduceOp::kSum, label("gradient sums", input.size(1)))
        .wait();

    at::Tensor grad_input;
    at::Tensor grad_weight;
    at::Tensor grad_bias;
    if (context->needs_input_grad(0)) {
      grad_input = input_gradient(grad_output, input, weight, stats, sums);
    }
    if (weight.defined()) grad_weight = own[1] * stats.invstd;
    if (context->saved_data["has_bias"].toBool()) grad_bias = own[0];
    return {grad_input, grad_weight, grad_bias, {}};
  }

  static Communicator& communicator_of(AutogradContext* context) {
    const auto capsule = context->saved_data["communicator"].toCapsule();
    return *c10::static_intrusive_pointer_cast<CommunicatorHolder>(capsule)->communicator;
  }
};

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& input,
                     RankOf where) {
  if (!parameter.defined()) return;
  TORCH_CHECK_VALUE(
      parameter.numel() == input.size(1),
      error_text(kArea,
                 "got an input of " + std::to_string(input.size(1)) + " channels, expected " +
                     std::to_string(parameter.numel()) + " as in " + name,
                 where, "Construct the layer with that many features."));
  const at::ScalarType dtype = parameter.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == input.scalar_type() || dtype == stats_dtype(input),
      error_text(kArea,
                 std::string("got a ") + c10::toString(input.scalar_type()) + " input, expected " +
                     c10::toString(dtype) + " as " + name + " is",
                 where, "Cast the input or the layer; half inputs also go with float parameters."));
}

void check_request(const BatchNormRequest& request, RankOf where) {
  const at::Tensor& input = request.input;
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(1) > 0,
                    error_text(kArea,
                               "got an input of shape " + c10::str(input.sizes()) +
                                   ", expected (batch, channels, ...) with at least 1 channel",
                               where, "Give the input its batch and channel dimensions."));
  TORCH_CHECK_TYPE(input.is_floating_point(),
                   error_text(kArea,
                              std::string("got a ") + c10::toString(input.scalar_type()) +
                                  " input, expected floating-point numbers",
                              where, "Cast the input."));
  check_parameter(request.weight, "weight", input, where);
  check_parameter(request.bias, "bias", input, where);
  check_parameter(request.running_mean, "running_mean", input, where);
  check_parameter(request.running_var, "running_var", input, where);
}

// A group of one needs no exchange, and torch's own kernels then also differentiate twice.
at::Tensor forward_alone(const BatchNormRequest& request, RankOf where) {
  const at::Tensor& input = request.input;
  TORCH_CHECK_VALUE(input.numel() != input.size(1),
                    error_text(kArea, "got 1 value per channel, expected more in training", where,
                               "Train with a larger batch."));
  return at::batch_norm(input, request.weight, request.bias, request.running_mean,
                        request.running_var, /*training=*/true, request.momentum, request.eps,
                        at::globalContext().userEnabledCuDNN());
}

}  // namespace

BatchNormSync::BatchNormSync(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {
  TORCH_CHECK_VALUE(communicator_ != nullptr,
                    error_text(kArea, "got no communicator, expected that of an initialised group",
                               {}, "Call trireme::init() first and pass its communicator()."));
}

at::Tensor BatchNormSync::forward(const BatchNormRequest& request) {
  const RankOf where = communicator_->rank_of();
  check_request(request, where);
  if (where.world == 1) return forward_alone(request, where);
  const at::Tensor& input = request.input;
  agree_on({input.size(1), stats_dtype(input)}, input.device());
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
  };
  return SyncBatchNormFunction::apply(input, optional(request.weight), optional(request.bias),
                                      SyncBatchNormFunction::Call{communicator_, request});
}

void BatchNormSync::agree_on(const Layout& layout, c10::Device device) {
  if (layout == agreed_) return;
  const std::string own = std::to_string(layout.channels) + " channels with statistics in " +
                          c10::toString(layout.dtype);
  const auto differs =
      first_difference(distinct_texts({own, "layouts of a batch norm"}, *communicator_, device));
  TORCH_CHECK_VALUE(
      !differs,
      error_text(kArea,
                 "got " + differs->first + " on rank 0 but " + differs->other + " on rank " +
                     std::to_string(differs->rank) + ", expected the same",
                 communicator_->rank_of(), "Build and cast the model alike on every rank."));
  agreed_ = layout;
}

}  // namespace trireme
