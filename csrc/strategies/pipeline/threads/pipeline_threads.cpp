#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>
#include <trireme/common/intra_op_threads.h>
#include <trireme/module/module_replicas.h>
#include <trireme/strategies/pipeline/gradients/step_gradients.h>
#include <trireme/strategies/pipeline/gradients/unlisted_gradients.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/threads/pass_schedule.h>

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

namespace trireme {

namespace {

at::Tensor stand_in_of(const at::Tensor& parameter) {
  at::Tensor stand_in = parameter.detach();
  follow_master(parameter, stand_in);
  return stand_in;
}

// Lets the current streams of the same devices wait for the work on `streams`.
void join_current(const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    const c10::Stream current =
        c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
    if (current == stream) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    event.block(current);
  }
}

}  // namespace

std::shared_ptr<WorkerPool> pipeline_pool(std::vector<c10::Device> devices) {
  std::vector<int> threads = intra_op_threads_of(at::get_num_threads(), devices.size());
  return std::make_shared<WorkerPool>(std::move(devices), std::move(threads),
                                      PoolWords{"pipeline", "a stage", "the rows", "the Pipeline"});
}

std::vector<c10::Device> devices_of_threads(const PipelineSchedule& schedule,
                                            const std::vector<PipelineStageRequest>& stages) {
  std::vector<std::optional<c10::Device>> found(static_cast<size_t>(schedule.ranks));
  std::optional<c10::Device> first;
  for (const PipelineStageRequest& stage : stages) {
    if (stage.parameters.tensors.empty()) continue;
    const c10::Device device = stage.parameters.tensors.front().device();
    const int64_t thread = schedule.stage_rank[static_cast<size_t>(stage.stage)];
    std::optional<c10::Device>& own = found[static_cast<size_t>(thread)];
    if (!own) own = device;
    if (!first) first = device;
  }
  std::vector<c10::Device> devices;
  devices.reserve(found.size());
  for (const std::optional<c10::Device>& device : found)
    devices.push_back(device.value_or(first.value_or(c10::Device(at::kCPU))));
  return devices;
}

PipelineThreads::PipelineThreads(PipelineThreadsRequest request, std::shared_ptr<WorkerPool> pool)
    : schedule_(std::move(request.schedule)),
      scale_grads_(request.scale_grads),
      pool_(std::move(pool)),
      devices_(pool_->devices()),
      is_on_devices_(std::any_of(devices_.begin(), devices_.end(),
                                 [](c10::Device device) { return !device.is_cpu(); })),
      group_(schedule_.ranks, devices_),
      shared_(static_cast<size_t>(schedule_.ranks)),
      unlisted_(std::make_shared<UnlistedGradients>()),
      engines_(shared_.size()),
      given_(request.stages),
      skips_(request.skips),
      on_error_(std::move(request.on_error)) {
  TORCH_INTERNAL_ASSERT(pool_->count() == shared_.size());
  std::vector<StageTensors> tensors;
  for (const PipelineStageRequest& stage : request.stages)
    tensors.push_back({schedule_.stage_rank[static_cast<size_t>(stage.stage)],
                       stage.parameters.names, stage.parameters.tensors});
  PipelineEngineOptions options{.scale_grads = request.scale_grads,
                                .skips = std::move(request.skips),
                                .tied = find_tied(tensors)};
  options.on_threads = true;
  options.unlisted = unlisted_;
  std::vector<std::vector<PipelineStageRequest>> of_threads(shared_.size());
  for (size_t thread = 0; thread < shared_.size(); ++thread) {
    indices_.push_back(thread);
    leaves_.push_back(std::make_shared<LeafEdges>());
  }
  for (const TiedParameter& tied : options.tied) {
    const auto find = [&](const TiedParameter::Holder& holder) {
      const StageTensors& stage = tensors[static_cast<size_t>(holder.stage)];
      const auto name = std::find(stage.names.begin(), stage.names.end(), holder.name);
      return stage.tensors[static_cast<size_t>(name - stage.names.begin())];
    };
    for (size_t i = 1; i < tied.holders.size(); ++i) {
      const at::Tensor parameter = find(tied.holders[i]);
      const auto thread = schedule_.stage_rank[static_cast<size_t>(tied.holders[i].stage)];
      shared_[static_cast<size_t>(thread)].push_back({parameter, stand_in_of(parameter)});
    }
  }
  for (const PipelineStageRequest& stage : request.stages) list_parameters(stage);
  std::vector<at::Tensor> listed;
  for (const PassParameter& known : parameters_) listed.push_back(known.parameter);
  unlisted_->set_listed(listed);
  for (PipelineStageRequest& stage : request.stages) {
    const auto thread = static_cast<size_t>(schedule_.stage_rank[static_cast<size_t>(stage.stage)]);
    stage.parameters = with_stand_ins(thread, std::move(stage.parameters));
    stage.leaves = leaves_[thread];
    of_threads[thread].push_back(std::move(stage));
  }
  run([&](size_t thread) {
    engines_[thread] = std::make_unique<PipelineEngine>(
        schedule_, std::move(of_threads[thread]), group_.communicator(static_cast<int64_t>(thread)),
        options);
  });
}

PipelineThreads::~PipelineThreads() = default;

void PipelineThreads::list_parameters(const PipelineStageRequest& stage) {
  const auto thread = static_cast<size_t>(schedule_.stage_rank[static_cast<size_t>(stage.stage)]);
  for (size_t i = 0; i < stage.parameters.tensors.size(); ++i) {
    const at::Tensor& parameter = stage.parameters.tensors[i];
    if (parameter.device() != devices_[thread]) {
      refuse_pipeline(c10::str("got '", stage.parameters.names[i], "' of stage ", stage.stage,
                               " on ", parameter.device(), ", expected it on ", devices_[thread],
                               ", where that stage computes"),
                      "Put what layers share on one device, and all of a stage.");
    }
    auto known = std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& candidate) {
      return candidate.parameter.is_same(parameter);
    });
    if (known == parameters_.end()) known = parameters_.insert(known, {parameter});
    const bool is_known =
        std::any_of(known->stand_ins.begin(), known->stand_ins.end(),
                    [&](const auto& stand_in) { return stand_in.first == thread; });
    if (!is_known) known->stand_ins.emplace_back(thread, at::Tensor());
  }
}

NamedParameters PipelineThreads::with_stand_ins(size_t thread, NamedParameters parameters) {
  for (at::Tensor& tensor : parameters.tensors) {
    for (const Shared& shared : shared_[thread])
      if (tensor.is_same(shared.parameter)) tensor = shared.stand_in;
  }
  return parameters;
}

void PipelineThreads::look_at_shared() {
  for (size_t thread = 0; thread < shared_.size(); ++thread) {
    *leaves_[thread] = LeafEdges();
    for (const Shared& shared : shared_[thread]) {
      shared.stand_in.mutable_grad().reset();
      follow_master(shared.parameter, shared.stand_in);
      if (shared.parameter.requires_grad()) leaves_[thread]->add(shared.parameter, shared.stand_in);
    }
  }
}

void PipelineThreads::run(const Job& job) {
  raised_in_.clear();
  group_.recover();
  PassRandom random;
  std::exception_ptr interruption;
  const auto look = [&] {
    if (interruption) return;
    try {
      check_interruption();
    } catch (const Interruption& caught) {
      interruption = std::current_exception();
      for (const size_t thread : indices_)
        group_.communicator(static_cast<int64_t>(thread))->announce_failure(caught.reason);
    }
  };
  const std::vector<std::exception_ptr> errors = pool_->run(
      indices_,
      [&](size_t thread) {
        const ReplicaRandomGuard draws(&random, thread);
        try {
          job(thread);
        } catch (...) {  // threads that are not in a step do not tell the others
          const auto& engine = engines_[thread];
          if (on_error_) on_error_(engine ? engine->raised_in() : "", std::current_exception());
          group_.communicator(static_cast<int64_t>(thread))
              ->announce_failure(text_of(std::current_exception()));
          throw;
        }
      },
      look);
  if (interruption) std::rethrow_exception(interruption);
  std::exception_ptr first;
  for (size_t thread = 0; thread < errors.size(); ++thread) {
    if (!errors[thread]) continue;
    if (!first) first = errors[thread];
    const std::string where = engines_[thread] ? engines_[thread]->raised_in() : std::string();
    if (where.empty()) continue;
    raised_in_ = where;
    std::rethrow_exception(errors[thread]);
  }
  if (first) std::rethrow_exception(first);
}

void PipelineThreads::refuse_strategies() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_strategies(),
      error_text("pipeline",
                 "got a step of a pipeline in one process whose gradients DistributedDataParallel, "
                 "ZeRO 2 or fully_shard averages: several threads would call their collectives",
                 {}, "Call the pipeline, and backward(), or use ranks."));
}

at::Tensor PipelineThreads::PassParameter::take_gradient() {
  at::Tensor sum;
  for (auto& [thread, stand_in] : stand_ins) {
    at::Tensor gradient = std::exchange(stand_in.mutable_grad(), at::Tensor());
    sum = sum.defined() ? sum_of(std::move(sum), gradient) : std::move(gradient);
  }
  return sum;
}

std::shared_ptr<PipelineThreads> PipelineThreads::for_pass(int64_t micro_batches,
                                                           Recomputation which) {
  pool_->expect_call();
  const std::lock_guard turn(turn_);
  std::shared_ptr<PipelineThreads>& made = for_passes_[{micro_batches, which}];
  if (!made) {
    made = std::make_shared<PipelineThreads>(
        PipelineThreadsRequest{with_recomputation(pass_schedule(schedule_, micro_batches), which),
                               given_, scale_grads_, skips_, on_error_},
        pool_);
  }
  return made;
}

PassOutputs PipelineThreads::forward_pass(std::vector<PipelineValue> inputs, PassState& state,
                                          const PassOptions& options) {
  pool_->expect_call();
  const std::lock_guard turn(turn_);
  if (options.records) {
    state.streams = current_streams(devices_);
    for (PassParameter parameter : parameters_) {
      if (!parameter.parameter.requires_grad()) continue;
      for (auto& [thread, stand_in] : parameter.stand_ins)
        stand_in = stand_in_of(parameter.parameter);
      state.parameters.push_back(std::move(parameter));
    }
  }
  PassOutputs found;
  std::vector<std::vector<PassLoss>> losses(engines_.size());
  state.kept.resize(engines_.size());
  const auto first = static_cast<size_t>(schedule_.stage_rank.front());
  const auto last = static_cast<size_t>(schedule_.stage_rank.back());
  run([&](size_t thread) {
    PassOutputs own = thread == first ? engines_[thread]->forward_pass(std::move(inputs), options)
                                      : engines_[thread]->forward_pass({}, options);
    state.kept[thread] = std::move(own.kept);
    losses[thread] = std::move(own.losses);
    if (thread == last) found.outputs = std::move(own.outputs);
  });
  for (std::vector<PassLoss>& of_thread : losses)
    std::move(of_thread.begin(), of_thread.end(), std::back_inserter(found.losses));
  std::stable_sort(found.losses.begin(), found.losses.end(),
                   [](const PassLoss& a, const PassLoss& b) {
                     return std::tie(a.micro_batch, a.stage) < std::tie(b.micro_batch, b.stage);
                   });
  if (scale_grads_)
    for (PassLoss& loss : found.losses)
      loss.part.weight /= static_cast<double>(schedule_.micro_batches);
  return found;
}

void PipelineThreads::backward_pass(const PassState& state, const PassBackward& backward) {
  pool_->expect_call();
  const std::lock_guard turn(turn_);
  for (const std::shared_ptr<LeafEdges>& leaves : leaves_) *leaves = LeafEdges();
  for (const PassParameter& parameter : state.parameters) {
    for (const auto& [thread, stand_in] : parameter.stand_ins) {
      stand_in.mutable_grad().reset();
      leaves_[thread]->add(parameter.parameter, stand_in);
    }
  }
  {
    const c10::MultiStreamGuard streams(state.streams);
    run([&](size_t thread) { engines_[thread]->backward_pass(*state.kept[thread], backward); });
  }
  join_current(state.streams);
}

at::Tensor PipelineThreads::step(std::vector<PipelineValue> inputs, const StepMode& mode) {
  refuse_strategies();
  pool_->expect_call();
  const std::lock_guard turn(turn_);
  look_at_shared();
  StepMode known = mode;
  known.divides_losses =
      mode.divides_losses.value_or(mode.asks_to_divide_losses) || divides_losses();
  std::vector<at::Tensor> losses(engines_.size());
  const auto first = static_cast<size_t>(schedule_.stage_rank.front());
  try {
    run([&](size_t thread) {
      losses[thread] = thread == first ? engines_[thread]->step(std::move(inputs), known)
                                       : engines_[thread]->step({}, known);
    });
  } catch (...) {
    unlisted_->abandon();
    throw;
  }
  unlisted_->end(scale_grads_ && !*known.divides_losses ? schedule_.micro_batches : 1);
  for (const std::vector<Shared>& of_thread : shared_)
    for (const Shared& shared : of_thread) shared.stand_in.mutable_grad().reset();
  return losses.front();
}

PipelineRunner::Evaluation PipelineThreads::eval_step(std::vector<PipelineValue> inputs,
                                                      bool has_loss) {
  pool_->expect_call();
  const std::lock_guard turn(turn_);
  Evaluation found;
  const auto first = static_cast<size_t>(schedule_.stage_rank.front());
  const auto last = static_cast<size_t>(schedule_.stage_rank.back());
  run([&](size_t thread) {
    Evaluation own = thread == first ? engines_[thread]->eval_step(std::move(inputs), has_loss)
                                     : engines_[thread]->eval_step({}, has_loss);
    if (thread == last) found = std::move(own);
  });
  return found;
}

bool PipelineThreads::has_strategies() const {
  return std::any_of(engines_.begin(), engines_.end(),
                     [](const auto& engine) { return engine->has_strategies(); });
}

bool PipelineThreads::divides_losses() const {
  return std::any_of(engines_.begin(), engines_.end(),
                     [](const auto& engine) { return engine->divides_losses(); });
}

PipelineReport PipelineThreads::last_step() const {
  PipelineReport all;
  const auto threads = static_cast<double>(engines_.size());
  for (const auto& engine : engines_) {
    PipelineReport report = engine->last_step();
    all.step = report.step;
    all.step_ms = std::max(all.step_ms, report.step_ms);
    all.bubble += report.bubble / threads;
    all.computed_bubble += report.computed_bubble / threads;
    std::move(report.stages.begin(), report.stages.end(), std::back_inserter(all.stages));
  }
  std::sort(all.stages.begin(), all.stages.end(),
            [](const StageReport& a, const StageReport& b) { return a.stage < b.stage; });
  return all;
}

}  // namespace trireme
