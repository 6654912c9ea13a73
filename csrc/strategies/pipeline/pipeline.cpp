#include <trireme/strategies/pipeline/pipeline.h>

#include <trireme/comm/subgroups.h>
#include <trireme/comm/threads/thread_group.h>
#include <trireme/common/worker_pool.h>
#include <trireme/module/meets_ranks.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_text.h>
#include <trireme/strategies/pipeline/threads/pipeline_pass.h>
#include <trireme/strategies/pipeline/threads/row_threads.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace trireme {

namespace {

PipelineSchedule plain_schedule_of(const PipelineOptions& options, int64_t ranks) {
  if (options.schedule.find_first_of(",\n") == std::string::npos) {
    return pipeline_schedule({.name = options.schedule,
                              .ranks = ranks,
                              .micro_batches = options.chunks,
                              .stages_per_rank = options.stages_per_rank});
  }
  PipelineSchedule schedule = schedule_from_csv(options.schedule);
  if (schedule.ranks != ranks || schedule.micro_batches != options.chunks) {
    refuse_pipeline("got a table for " + std::to_string(schedule.ranks) + " ranks and " +
                        std::to_string(schedule.micro_batches) + " micro-batches, expected " +
                        std::to_string(ranks) + " and " + std::to_string(options.chunks),
                    "Pass a table of that many.");
  }
  return schedule;
}

}  // namespace

PipelineSchedule schedule_of(const PipelineOptions& options, int64_t ranks) {
  return with_recomputation(plain_schedule_of(options, ranks), recomputation(options.checkpoint));
}

PipelineRanks ranks_of_copy(std::shared_ptr<Communicator> all, const PipelineOptions& options) {
  const int64_t replicas = options.replicas;
  if (!options.ranks) {
    if (replicas != 1)
      refuse_pipeline(c10::str("got replicas=", replicas, " of a pipeline in one process"),
                      "Leave it out, or use ranks.");
    return {ThreadGroup(1).communicator(0)};
  }
  if (options.threads != 0)
    refuse_pipeline(c10::str("got threads=", options.threads, " of a pipeline on ranks"),
                    "Pass ranks = false.");
  if (!options.devices.empty())
    refuse_pipeline("got devices of a pipeline on ranks", "Move each rank's layers before.");
  if (replicas == 1) return {std::move(all)};
  if (replicas < 1 || all->world() % replicas != 0) {
    refuse_pipeline("got replicas=" + std::to_string(replicas) + " of a pipeline on " +
                        std::to_string(all->world()) + " ranks, expected a divisor of these",
                    "Give each replica as many ranks.");
  }
  const int64_t ranks = all->world() / replicas;
  PipelineRanks found{split_contiguous(*all, ranks), split_strided(*all, ranks)};
  if (!found.communicator || !found.replicas)
    refuse_pipeline(
        "got replicas=" + std::to_string(replicas) + " over an engine without subgroups",
        "Use Gloo, NCCL, or trireme's backend.");
  return found;
}

int64_t rows_of(const PipelineOptions& options, const PipelineRanks& ranks, int64_t layers) {
  if (options.ranks) return ranks.communicator->world();
  if (options.threads < 0)
    refuse_pipeline(c10::str("got threads=", options.threads), "Pass 1 or more, or 0.");
  for (const c10::Device device : options.devices) {
    if (!device.is_cpu() && !device.has_index())
      refuse_pipeline(c10::str("got device ", device, " without its number"), "Number it.");
  }
  const auto devices = static_cast<int64_t>(options.devices.size());
  if (devices > 0 && options.threads > 0 && options.threads != devices)
    refuse_pipeline(c10::str("got threads=", options.threads, " and ", devices, " devices"),
                    "Leave threads out.");
  if (devices > 0) return devices;
  if (options.threads > 0) return options.threads;
  if (!options.balance.empty())
    return static_cast<int64_t>(options.balance.size()) / options.stages_per_rank.value_or(1);
  return std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(layers, 1));
}

std::vector<c10::Device> devices_of_stages(const PipelineOptions& options,
                                           const PipelineSchedule& schedule) {
  std::vector<c10::Device> devices;
  if (options.devices.empty()) return devices;
  for (const int64_t row : schedule.stage_rank)
    devices.push_back(options.devices[static_cast<size_t>(row)]);
  return devices;
}

std::unique_ptr<PipelineRunner> make_runner(const PipelineOptions& options,
                                            const PipelineRanks& ranks, PipelineSchedule schedule,
                                            std::vector<PipelineStageRequest> stages,
                                            PipelineEngineOptions engine_options) {
  if (options.ranks) {
    return std::make_unique<PipelineEngine>(std::move(schedule), std::move(stages),
                                            ranks.communicator, engine_options);
  }
  auto pool =
      row_pool(options.devices.empty() ? devices_of_rows(schedule, stages) : options.devices);
  pool->start();
  return std::make_unique<RowThreads>(
      RowThreadsRequest{std::move(schedule), std::move(stages), engine_options.scale_grads,
                        std::move(engine_options.skips)},
      std::move(pool));
}

at::Tensor run_pass(RowThreads* threads, const PassRequest& request, MicroBatches& batch) {
  TORCH_CHECK_TYPE(threads != nullptr, error_text("pipeline", "got a call of a pipeline on ranks",
                                                  {}, "Call step(), or eval_step() for outputs."));
  CallTurn& turn = request.turn;
  const CallTurn::Guard guard(turn, *threads);
  const auto& [input, dim, chunks, trains, checkpoint, batch_norms, _] = request;
  const int64_t rows = input.dim() > dim ? input.size(dim) : 0;
  const int64_t count = std::clamp<int64_t>(rows, 1, chunks);
  const auto alone = ThreadGroup(1).communicator(0);
  MicroBatches cut = cut_batch({{input}, {}, dim, count}, *alone);
  const auto pass = std::make_shared<PipelinePass>(
      threads->for_pass(count,
                        trains && at::GradMode::is_enabled() ? checkpoint : Recomputation::kNever),
      cut.versions);
  for (size_t i = 0; i < cut.inputs.size(); ++i)
    for (at::Tensor& tensor : cut.inputs[i].tensors)
      tensor = pass->enter(tensor, static_cast<int64_t>(i));
  batch = cut;
  const auto around = [threads, &turn, &batch, cut](bool begins) {
    if (begins) turn.take(threads);
    batch = begins ? cut : MicroBatches();
    if (!begins) turn.give_back();
  };
  std::vector<PipelineValue> values =
      batch_norms.whole_batch([&] { return pass->forward(std::move(cut.inputs), around); });
  std::vector<at::Tensor> outputs;
  for (PipelineValue& value : values) outputs.push_back(std::move(value.tensors.front()));
  return count == 1 ? outputs.front() : at::cat(outputs, dim);
}

std::vector<int64_t> stage_bounds(const PipelineOptions& options, int64_t layers, int64_t stages) {
  std::vector<int64_t> balance = options.balance;
  if (balance.empty()) {
    balance = partition({std::vector<double>(static_cast<size_t>(layers), 1.0), stages});
  }
  const int64_t sum = std::accumulate(balance.begin(), balance.end(), int64_t{0});
  bool is_cut = static_cast<int64_t>(balance.size()) == stages && sum == layers;
  for (const int64_t count : balance) is_cut = is_cut && count > 0;
  if (!is_cut) {
    refuse_pipeline(c10::str("got a balance of ", at::IntArrayRef(balance), " for ", layers,
                             " layers and ", stages, " stages"),
                    "Give each stage one layer or more, all layers in all.");
  }
  std::vector<int64_t> bounds{0};
  for (const int64_t count : balance) bounds.push_back(bounds.back() + count);
  return bounds;
}

std::vector<PipelineSkip> skips_of_stages(std::vector<PipelineSkip> skips,
                                          const std::vector<int64_t>& bounds) {
  std::stable_sort(skips.begin(), skips.end(),
                   [](const PipelineSkip& a, const PipelineSkip& b) { return a.to < b.to; });
  const auto stage_of = [&](int64_t layer) {
    return std::upper_bound(bounds.begin(), bounds.end(), layer) - bounds.begin() - 1;
  };
  for (PipelineSkip& skip : skips) {
    if (skip.from < 0 || skip.to < skip.from || skip.to >= bounds.back()) {
      refuse_pipeline(
          c10::str("got the skip '", skip.name, "' from layer ", skip.from, " to layer ", skip.to,
                   ", expected it from one of ", bounds.back(), " layers to a later one"),
          "Pop behind the stash.");
    }
    skip.from = stage_of(skip.from);
    skip.to = stage_of(skip.to);
  }
  return skips;
}

void refuse_meetings_in_stages(const torch::nn::Module& layers, const PipelineOptions& options) {
  const std::string found = meeting_of_ranks(layers, options.ranks ? options.replicas : 1);
  if (!found.empty())
    refuse_pipeline("got " + found + " over ranks that have other stages",
                    "Give it a communicator of the ranks with this stage, or keep BatchNorm.");
}

std::unordered_map<std::string, std::string> names_in_whole(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  std::unordered_map<std::string, std::string> later;
  for (const auto& items : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : items) {
      if (!item.value().defined()) continue;
      const auto [known, is_first] =
          first.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
      if (!is_first) later[item.key()] = known->second;
    }
  }
  return later;
}

GradNormPart gradients_of_stages(const std::vector<at::Tensor>& parameters,
                                 const std::vector<at::Tensor>& copies,
                                 std::shared_ptr<Communicator> communicator) {
  GradNormPart part;
  part.device = communicator->device();
  part.stages = std::move(communicator);
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& copy : copies) {
    seen.insert(copy.unsafeGetTensorImpl());
    if (copy.grad().defined()) part.counted_elsewhere.push_back(copy.grad());
  }
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      part.gradients.push_back(parameter.grad());
  }
  return part;
}

}  // namespace trireme
