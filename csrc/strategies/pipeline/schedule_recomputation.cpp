#include <trireme/strategies/pipeline/schedule_recomputation.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <string>

namespace trireme {
namespace {

using Passages = std::set<std::pair<int32_t, int32_t>>;  // stage and micro-batch

std::pair<int32_t, int32_t> passage_of(const PipelineAction& action) {
  return {action.stage, action.micro_batch};
}

bool begins_backward(const PipelineAction& action) {
  return action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
}

// Returns the passages whose backward directly follows their forward.
Passages backward_at_once(const RankActions& row) {
  Passages found;
  PipelineAction before;
  for (const PipelineAction& action : row) {
    if (!is_compute(action.kind)) continue;
    for_each_part(action, [&](const PipelineAction& part) {
      if (begins_backward(part) && before.kind == ActionKind::kForward &&
          passage_of(part) == passage_of(before))
        found.insert(passage_of(part));
      before = part;
    });
  }
  return found;
}

}  // namespace

Recomputation recomputation(std::string_view name) {
  if (name == "never") return Recomputation::kNever;
  if (name == "except_last") return Recomputation::kExceptLast;
  if (name == "always") return Recomputation::kAlways;
  if (name == "auto") return Recomputation::kAuto;
  refuse_pipeline("got checkpoint='" + std::string(name) +
                      "', expected 'always', 'except_last', 'never' or 'auto'",
                  "Pass one of them.");
}

Passages recomputed_in(const RankActions& actions) {
  Passages found;
  for (const PipelineAction& action : actions) {
    for_each_part(action, [&](const PipelineAction& part) {
      if (part.kind == ActionKind::kRecompute) found.insert(passage_of(part));
    });
  }
  return found;
}

PipelineSchedule with_recomputation(PipelineSchedule schedule, Recomputation which) {
  if (which == Recomputation::kNever) return schedule;
  for (RankActions& row : schedule.rows) {
    if (!recomputed_in(row).empty()) {
      refuse_pipeline("got a table with R, expected one without where more are asked for",
                      "Leave recomputation to the table, or take R out of it.");
    }
    Passages plain;
    if (which == Recomputation::kAuto) plain = backward_at_once(row);
    RankActions longer;
    for (PipelineAction& action : row) {
      for_each_part(action, [&](const PipelineAction& part) {
        if (!begins_backward(part) || plain.count(passage_of(part)) > 0) return;
        const bool is_last = part.micro_batch + 1 == schedule.micro_batches;
        if (which == Recomputation::kExceptLast && is_last) return;
        longer.push_back({part.stage, ActionKind::kRecompute, part.micro_batch});
      });
      longer.push_back(std::move(action));
    }
    row = std::move(longer);
  }
  return schedule;
}

}  // namespace trireme
