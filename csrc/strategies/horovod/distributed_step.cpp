#include <trireme/strategies/horovod/distributed_step.h>

#include <trireme/strategies/horovod/adasum.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <utility>

namespace trireme::horovod {
namespace {

void append(NamedParameters& named, const std::string& name, const at::Tensor& parameter) {
  named.names.push_back(name);
  named.tensors.push_back(parameter);
  named.sparse_gradient.push_back(false);
}

OptimizerGradientsOptions checked(const DistributedOptimizerOptions& options, RankOf where) {
  TORCH_CHECK_VALUE(
      options.op == Op::kAverage || options.op == Op::kSum || options.op == Op::kAdasum,
      error_text(kArea, "got another op of gradients than kAverage, kSum or kAdasum", where,
                 "Leave it out for the average."));
  TORCH_CHECK_VALUE(!options.compression || *options.compression == at::kHalf ||
                        *options.compression == at::kBFloat16,
                    error_text(kArea, "got another compression than at::kHalf or at::kBFloat16",
                               where, "Leave it out for none."));
  if (options.op == Op::kAdasum) check_adasum_ranks(where.world);
  OptimizerGradientsOptions found;
  found.op = options.op == Op::kAverage ? GradientOp::kAverage
             : options.op == Op::kSum   ? GradientOp::kSum
                                        : GradientOp::kNone;
  found.predivide_factor = options.gradient_predivide_factor;
  found.backward_passes_per_step = options.backward_passes_per_step;
  found.reduce_dtype = options.compression;
  found.sparse_as_dense = options.sparse_as_dense;
  return found;
}

}  // namespace

OptimizerParameters::OptimizerParameters(const std::vector<at::Tensor>& parameters)
    : OptimizerParameters(std::vector<torch::optim::OptimizerParamGroup>{
          torch::optim::OptimizerParamGroup(parameters)}) {}

OptimizerParameters::OptimizerParameters(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups)
    : groups(param_groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<at::Tensor>& parameters = groups[i].params();
    for (size_t j = 0; j < parameters.size(); ++j)
      append(named, c10::str("allreduce.noname.", i, ".", j), parameters[j]);
  }
}

OptimizerParameters::OptimizerParameters(const torch::nn::Module& module)
    : named(named_parameters(module)) {
  groups.emplace_back(named.tensors);
}

DistributedStep::DistributedStep(const NamedParameters& parameters,
                                 std::shared_ptr<Communicator> ranks,
                                 const DistributedOptimizerOptions& options)
    : parameters_(parameters),
      ranks_(std::move(ranks)),
      combines_(options.op == Op::kAdasum),
      options_(checked(options, ranks_->rank_of())),
      gradients_(std::make_unique<OptimizerGradients>(parameters_, ranks_, options_)) {}

void DistributedStep::set_backward_passes_per_step(int64_t passes) {
  gradients_->set_backward_passes_per_step(passes);
  options_.backward_passes_per_step = passes;
}

void DistributedStep::check_adds_now() const {
  TORCH_CHECK(!gradients_->has_passes(),
              error_text(kArea, "got parameters to add between a backward and its step",
                         ranks_->rank_of(), "Add them after step()."));
}

void DistributedStep::add(const std::vector<at::Tensor>& parameters, size_t groups) {
  for (size_t i = 0; i < parameters.size(); ++i)
    append(parameters_, c10::str("allreduce.noname.", groups - 1, ".", i), parameters[i]);
  gradients_->end("parameters were added");
  gradients_ = std::make_unique<OptimizerGradients>(parameters_, ranks_, options_);
}

void DistributedStep::check_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  size_t stepped = 0;
  for (const torch::optim::OptimizerParamGroup& group : groups) stepped += group.params().size();
  TORCH_CHECK(
      stepped == parameters_.tensors.size(),
      error_text(kArea,
                 c10::str("got ", stepped, " parameters to step, expected the ",
                          parameters_.tensors.size(), " whose gradients are reduced"),
                 ranks_->rank_of(), "Call add_param_group() of the DistributedOptimizer itself."));
}

at::Tensor DistributedStep::run(const std::function<at::Tensor(Closure)>& inner,
                                const Closure& closure) {
  return combines_ ? run_combining(inner, closure) : run_reducing(inner, closure);
}

at::Tensor DistributedStep::run_reducing(const std::function<at::Tensor(Closure)>& inner,
                                         const Closure& closure) {
  Closure reducing;
  if (closure) {
    reducing = [&] {
      at::Tensor loss = closure();
      if (gradients_->has_passes()) {
        gradients_->synchronize();
        gradients_->forget_passes();
      }
      return loss;
    };
  }
  if (!closure || gradients_->has_passes()) {
    if (const auto warning = gradients_->warning_of_step()) TORCH_WARN(*warning);
    gradients_->begin_step();
  }
  return inner(reducing);
}

at::Tensor DistributedStep::run_combining(const std::function<at::Tensor(Closure)>& inner,
                                          const Closure& closure) {
  gradients_->begin_step();
  std::vector<at::Tensor> stepped;
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : parameters_.tensors) {
    if (!parameter.requires_grad()) continue;
    stepped.push_back(parameter.detach());
    before.push_back(stepped.back().clone());
  }
  at::Tensor loss = inner(closure);
  gradients_->forget_passes();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> changes;
  for (size_t i = 0; i < stepped.size(); ++i) changes.push_back(stepped[i] - before[i]);
  adasum_over_ranks(changes, *ranks_, "changes of a step");
  for (size_t i = 0; ranks_->world() > 1 && i < stepped.size(); ++i)
    stepped[i].copy_(before[i].add_(changes[i]));
  return loss;
}

}  // namespace trireme::horovod
