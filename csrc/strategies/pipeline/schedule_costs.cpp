#include <trireme/strategies/pipeline/schedule_costs.h>

#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_run.h>

#include <algorithm>
#include <string>

namespace trireme {

std::vector<TimedAction> timeline(const PipelineSchedule& schedule, const ScheduleCosts& costs) {
  check_costs(costs, schedule.stages);
  const FlatSchedule flat(schedule);
  check_whole(flat);
  const ScheduleTimes times = run_schedule(flat, costs);
  std::vector<TimedAction> timed;
  for (size_t i = 0; i < flat.actions().size(); ++i) {
    const FlatAction& action = flat.actions()[i];
    if (!is_compute(action.kind)) continue;
    timed.push_back({action.rank,
                     {action.stage, action.kind, action.micro_batch},
                     times.begin[i],
                     times.end[i]});
  }
  return timed;
}

double makespan(const PipelineSchedule& schedule, const ScheduleCosts& costs) {
  double last = 0;
  for (const TimedAction& action : timeline(schedule, costs)) last = std::max(last, action.end);
  return last;
}

double bubble(const PipelineSchedule& schedule, const ScheduleCosts& costs) {
  double last = 0;
  double busy = 0;
  for (const TimedAction& action : timeline(schedule, costs)) {
    last = std::max(last, action.end);
    busy += action.end - action.begin;
  }
  return last > 0 ? 1 - busy / (last * static_cast<double>(schedule.ranks)) : 0;
}

int64_t most_live(const RankActions& actions) {
  const auto recomputed = recomputed_in(actions);
  int64_t live = 0;
  int64_t most = 0;
  for (const PipelineAction& action : actions) {
    for_each_part(action, [&](const PipelineAction& part) {
      const bool keeps = part.kind == ActionKind::kForward &&
                         recomputed.count({part.stage, part.micro_batch}) == 0;
      if (keeps || part.kind == ActionKind::kRecompute) ++live;
      if (part.kind == ActionKind::kBackward || part.kind == ActionKind::kBackwardWeight) --live;
      most = std::max(most, live);
    });
  }
  return most;
}

int64_t peak_activations(const PipelineSchedule& schedule, int64_t rank) {
  if (rank < 0 || rank >= schedule.ranks) {
    refuse_pipeline("got rank " + std::to_string(rank) + ", expected one of " +
                        std::to_string(schedule.ranks) + " ranks",
                    "Count ranks of the pipeline from 0 on.");
  }
  check_whole(FlatSchedule(schedule));
  return most_live(schedule.rows[static_cast<size_t>(rank)]);
}

int64_t peak_messages(const PipelineSchedule& schedule, PipelineEdge edge) {
  for (const EdgeSlots& need : check_schedule(schedule)) {
    if (need.edge == edge) return need.slots;
  }
  refuse_pipeline("got the edge from stage " + std::to_string(edge.from) + " to stage " +
                      std::to_string(edge.to) + ", where no message goes from rank to rank",
                  "Name two stages that follow each other and lie on different ranks.");
}

}  // namespace trireme
