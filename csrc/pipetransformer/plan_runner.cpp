#include <trireme/pipetransformer/plan_runner.h>

#include <trireme/activation/checkpoint_sequential.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace trireme {
namespace {

torch::nn::Sequential part_of(torch::nn::Sequential layers, int64_t begin, int64_t end) {
  torch::nn::Sequential part;
  for (int64_t i = begin; i < end; ++i) part->push_back(*(layers->begin() + i));
  return part;
}

}  // namespace

// A pipeline that takes the ids of a batch beside its rows.
class PlanRunner::RunPipeline : public PipelineImpl {
 public:
  using PipelineImpl::PipelineImpl;

  at::Tensor step_with(const std::vector<at::Tensor>& inputs, const at::Tensor& target,
                       const PipelineLoss& loss) {
    return step_batch(inputs, target, of_one(loss));
  }
};

PlanRunner::PlanRunner(const RunnerRequest& request, const ElasticCourse& course, int64_t frozen)
    : request_(request), frozen_(frozen), rows_(course.rows()) {
  const int64_t cached = request.cache ? std::min(frozen, course.plan().balance.front()) : 0;
  if (cached > 0) prefix_ = CachedPrefix(part_of(request_.layers, 0, cached), request_.cache);
  course.plan().ranks_per_pipeline > 1 ? make_pipeline(course) : make_copies(course);
}

PlanRunner::~PlanRunner() = default;

PipelineOptions PlanRunner::options_for(const ElasticPlan& plan, const std::string& schedule,
                                        int64_t micro_batches) {
  PipelineOptions options;
  options.chunks = micro_batches;
  options.balance = plan.balance;
  options.schedule = schedule;
  options.replicas = plan.replicas;
  return options;
}

// The cached layers are one layer of the pipeline, which asks for the ids of its micro-batch.
void PlanRunner::make_pipeline(const ElasticCourse& course) {
  const ElasticPlan& plan = course.plan();
  PipelineOptions options = options_for(plan, request_.schedule, course.micro_batches());
  std::vector<PipelineLayer> layers = layers_of(request_.layers);
  if (!prefix_.is_empty()) {
    const int64_t cached = std::min(frozen_, plan.balance.front());
    layers.erase(layers.begin(), layers.begin() + cached);
    const auto forward = [prefix = prefix_, net = request_.layers, cached,
                          evaluates = is_evaluating_](at::Tensor value) mutable {
      return *evaluates ? run_layers(net, 0, cached, std::move(value))
                        : prefix->forward(value, batch_input(1));
    };
    layers.insert(layers.begin(), {"prefix", prefix_.ptr(), forward});
    options.balance.front() -= cached - 1;
  }
  pipeline_ = std::make_shared<RunPipeline>(*request_.layers, layers, course.ranks(), options);
}

void PlanRunner::make_copies(const ElasticCourse& course) {
  const auto count = static_cast<int64_t>(request_.layers->size());
  rest_ = part_of(request_.layers, frozen_, count);
  if (!course.ranks() || course.ranks()->world() == 1) return;
  DdpOptions options;
  options.init_sync = false;  // all ranks have the same values
  options.init_sync_buffers = false;
  copies_ = std::make_shared<DistributedDataParallelImpl<torch::nn::Sequential>>(
      rest_, course.ranks(), options);
}

at::Tensor PlanRunner::front(const at::Tensor& input, const at::Tensor& ids) {
  if (!prefix_.is_empty()) return prefix_->forward(input, ids);
  const at::NoGradGuard no_grad;
  return run_layers(request_.layers, 0, frozen_, input);
}

at::Tensor PlanRunner::own(const at::Tensor& all) const {
  return all.defined() ? all.narrow(0, rows_.begin, rows_.end - rows_.begin) : all;
}

at::Tensor PlanRunner::step(const at::Tensor& input, const at::Tensor& ids,
                            const at::Tensor& target) {
  if (pipeline_) {
    std::vector<at::Tensor> inputs{own(input)};
    if (!prefix_.is_empty()) inputs.push_back(own(ids));
    return pipeline_->step_with(inputs, own(target), request_.loss);
  }
  const at::Tensor value = front(own(input), own(ids));
  const at::Tensor output = copies_ ? copies_->forward(value) : rest_->forward(value);
  const at::Tensor loss = request_.loss(output, own(target));
  loss.backward();
  return loss.detach();
}

at::Tensor PlanRunner::evaluate(const at::Tensor& input, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  if (!pipeline_) return request_.loss(request_.layers->forward(own(input)), own(target)).detach();
  *is_evaluating_ = true;
  try {
    const at::Tensor loss = pipeline_->eval_step(own(input), own(target), request_.loss);
    *is_evaluating_ = false;
    return loss;
  } catch (...) {
    *is_evaluating_ = false;
    throw;
  }
}

}  // namespace trireme
