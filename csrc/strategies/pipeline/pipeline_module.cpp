#include <trireme/strategies/pipeline/pipeline_module.h>

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/comm/threads/thread_group.h>
#include <trireme/common/error.h>
#include <trireme/common/worker_pool.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>
#include <trireme/strategies/pipeline/threads/pipeline_pass.h>
#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

std::unique_ptr<PipelineRunner> make_runner(const PipelineOptions& options,
                                            const PipelineRanks& ranks, PipelineSchedule schedule,
                                            std::vector<PipelineStageRequest> stages,
                                            PipelineEngineOptions engine_options) {
  if (options.ranks) {
    return std::make_unique<PipelineEngine>(std::move(schedule), std::move(stages),
                                            ranks.communicator, engine_options);
  }
  auto pool = pipeline_pool(options.devices.empty() ? devices_of_threads(schedule, stages)
                                                    : options.devices);
  pool->start();
  return std::make_unique<PipelineThreads>(
      PipelineThreadsRequest{std::move(schedule), std::move(stages), engine_options.scale_grads,
                             std::move(engine_options.skips)},
      std::move(pool));
}

// Puts the micro-batches of one output together.
at::Tensor whole_of(const std::vector<PipelineValue>& values, size_t output, int64_t dim) {
  std::vector<at::Tensor> parts;
  for (const PipelineValue& value : values) parts.push_back(value.tensors.at(output));
  return at::cat(parts, dim);
}

}  // namespace

// The part of a stage that is the caller's: layers, and the loss of the call that runs.
class PipelineModule::Function final : public StageFunction {
 public:
  Function(PipelineModule& pipe, std::function<Tensors(Tensors)> layers)
      : pipe_(pipe), layers_(std::move(layers)) {}

  PipelineValue forward(int64_t micro_batch, PipelineValue input) override {
    const MicroBatchScope scope(pipe_.batch_, micro_batch);
    std::optional<DeferredBatchNorms::Observer> sees;
    if (!is_recomputing()) sees.emplace(pipe_.batch_norms_);
    return {layers_(std::move(input.tensors))};
  }
  at::Tensor loss(int64_t micro_batch, const PipelineValue& output) override {
    const MicroBatchScope scope(pipe_.batch_, micro_batch);
    return (*pipe_.loss_)(output.tensors, batch_target());
  }

 private:
  PipelineModule& pipe_;
  std::function<Tensors(Tensors)> layers_;
};

PipelineModule::PipelineModule(std::shared_ptr<Communicator> communicator,
                               const PipelineOptions& options)
    : dim_(options.dim),
      chunks_(options.chunks),
      defers_batch_norms_(options.deferred_batch_norm),
      ranks_(ranks_of_replica(std::move(communicator), options)),
      turn_(options.ranks ? ranks_.communicator : nullptr) {}

void PipelineModule::add_layer(PipelineStageRequest& stage, const std::string& name,
                               const std::shared_ptr<torch::nn::Module>& layer) {
  register_module(name, layer);
  if (defers_batch_norms_) batch_norms_.add(layer, name);
  stage.sends_gradients = stage.sends_gradients || sends_gradients(*layer);
  for (const auto& parameter : layer->named_parameters()) {
    stage.parameters.names.push_back(name + "." + parameter.key());
    stage.parameters.tensors.push_back(parameter.value());
  }
  for (const auto& buffer : layer->named_buffers())
    stage.buffers.emplace_back(name + "." + buffer.key(), buffer.value());
}

std::shared_ptr<StageFunction> PipelineModule::function_of(std::function<Tensors(Tensors)> layers) {
  return std::make_shared<Function>(*this, std::move(layers));
}

void PipelineModule::start(const PipelineOptions& options, PipelineSchedule schedule,
                           std::vector<PipelineStageRequest> stages,
                           PipelineEngineOptions engine_options) {
  engine_options.scale_grads = options.scale_grads;
  engine_options.replicas = ranks_.replicas;
  engine_options.compression = options.compression;
  runner_ = make_runner(options, ranks_, std::move(schedule), std::move(stages),
                        std::move(engine_options));
}

std::vector<KeptCodes> PipelineModule::kept_codes() const { return runner_->kept_codes(); }

at::Tensor PipelineModule::clip_grad_norm_(double max_norm, double norm_type,
                                           bool error_if_nonfinite) {
  return trireme::clip_grad_norm_(gradients(), {max_norm, norm_type, error_if_nonfinite});
}

// A parameter with two names counts once, and copies of those of earlier stages count there.
std::vector<GradNormPart> PipelineModule::gradients() const {
  GradNormPart part;
  part.device = ranks_.communicator->device();
  part.stages = ranks_.communicator;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& copy : runner_->later_copies()) {
    seen.insert(copy.unsafeGetTensorImpl());
    if (copy.grad().defined()) part.counted_elsewhere.push_back(copy.grad());
  }
  for (const at::Tensor& parameter : parameters()) {
    if (parameter.grad().defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      part.gradients.push_back(parameter.grad());
  }
  return {std::move(part)};
}

at::Tensor PipelineModule::step_batch(const Tensors& inputs, const at::Tensor& target,
                                      const Loss& loss) {
  const CallTurn::Guard turn(turn_, *runner_);
  begin(inputs, target);
  loss_ = &loss;
  at::Tensor found = batch_norms_.whole_batch([&] {
    return runner_->step(
        batch_.inputs, {.synchronizes = synchronizes_, .asks_to_divide_losses = batch_.has_graph});
  });
  batch_.tell_batch();
  return found;
}

at::Tensor PipelineModule::eval_batch(const Tensors& inputs, const at::Tensor& target,
                                      const Loss& loss) {
  const CallTurn::Guard turn(turn_, *runner_);
  begin(inputs, target);
  loss_ = &loss;
  return run_forwards(/*has_loss=*/true).loss;
}

PipelineModule::Tensors PipelineModule::outputs_of_batch(const Tensors& inputs) {
  const CallTurn::Guard turn(turn_, *runner_);
  begin(inputs, {});
  const std::vector<PipelineValue> values = run_forwards(/*has_loss=*/false).outputs;
  Tensors outputs;
  const size_t count = values.empty() ? 0 : values.front().tensors.size();
  for (size_t i = 0; i < count; ++i) outputs.push_back(whole_of(values, i, dim_));
  return outputs;
}

at::Tensor PipelineModule::run_pass(const at::Tensor& input, Recomputation checkpoint) {
  auto* threads = dynamic_cast<PipelineThreads*>(runner_.get());
  TORCH_CHECK_TYPE(threads != nullptr, error_text("pipeline", "got a call of a pipeline on ranks",
                                                  {}, "Call step(), or eval_step() for outputs."));
  const CallTurn::Guard guard(turn_, *threads);
  const int64_t rows = input.dim() > dim_ ? input.size(dim_) : 0;
  const int64_t count = std::clamp<int64_t>(rows, 1, chunks_);
  const auto alone = ThreadGroup(1).communicator(0);
  MicroBatches cut = cut_batch({{input}, {}, dim_, count}, *alone);
  const bool records = is_training() && at::GradMode::is_enabled();
  const auto pass = std::make_shared<PipelinePass>(
      threads->for_pass(count, records ? checkpoint : Recomputation::kNever), cut.versions);
  for (size_t i = 0; i < cut.inputs.size(); ++i)
    for (at::Tensor& tensor : cut.inputs[i].tensors)
      tensor = pass->enter(tensor, static_cast<int64_t>(i));
  batch_ = cut;
  const auto around = [this, threads, cut](bool begins) {
    if (begins) turn_.take(threads);
    batch_ = begins ? cut : MicroBatches();
    if (!begins) turn_.give_back();
  };
  std::vector<PipelineValue> values =
      batch_norms_.whole_batch([&] { return pass->forward(std::move(cut.inputs), around); });
  return count == 1 ? std::move(values.front().tensors.front()) : whole_of(values, 0, dim_);
}

PipelineModule::Loss PipelineModule::of_one(const PipelineLoss& loss) {
  return [&loss](const Tensors& outputs, const at::Tensor& target) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "got ", outputs.size(),
                      " outputs of the last stage, and a loss that takes one");
    return loss(outputs.front(), target);
  };
}

void PipelineModule::begin(const Tensors& inputs, const at::Tensor& target) {
  runner_->recover();
  batch_ = cut_batch({inputs, target, dim_, chunks_}, *ranks_.communicator);
}

PipelineRunner::Evaluation PipelineModule::run_forwards(bool has_loss) {
  PipelineRunner::Evaluation found =
      batch_norms_.whole_batch([&] { return runner_->eval_step(batch_.inputs, has_loss); });
  batch_.tell_batch();
  return found;
}

}  // namespace trireme
