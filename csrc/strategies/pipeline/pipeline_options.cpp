#include <trireme/strategies/pipeline/pipeline_options.h>

#include <trireme/comm/subgroups.h>
#include <trireme/comm/threads/thread_group.h>
#include <trireme/module/meets_ranks.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <ATen/Parallel.h>

#include <algorithm>
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

PipelineRanks ranks_of_replica(std::shared_ptr<Communicator> all, const PipelineOptions& options) {
  const int64_t replicas = options.replicas;
  if (options.compression) {
    check(*options.compression);
    if (replicas == 1)
      refuse_pipeline("got compression of a pipeline without replicas, which averages nothing",
                      "Leave it out.");
  }
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

int64_t schedule_ranks(const PipelineOptions& options, const PipelineRanks& ranks, int64_t layers) {
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

}  // namespace trireme
