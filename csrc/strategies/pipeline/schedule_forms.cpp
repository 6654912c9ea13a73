#include <trireme/strategies/pipeline/schedule_forms.h>

#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_actions.h>
#include <trireme/strategies/pipeline/schedule_check.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace trireme {

RankActions looped_actions(const ScheduleShape& shape, int32_t rank) {
  RankActions row;
  const auto add_all = [&](ActionKind kind, int32_t local) {
    for (int32_t k = 0; k < shape.micro_batches; ++k) {
      row.push_back({local * shape.ranks + rank, kind, k});
    }
  };
  for (int32_t local = 0; local < shape.local_stages; ++local) {
    add_all(ActionKind::kForward, local);
  }
  for (int32_t local = shape.local_stages; local-- > 0;) add_all(ActionKind::kBackward, local);
  return row;
}

namespace {

// [Note: uneven rounds]
//
// In a round, each stage of a rank takes the same micro-batches, one stage after the other. With
// rounds of at least as many micro-batches as ranks, none larger than the first, no rank waits in a
// circle: what a rank needs from the stage before comes from the last rank a whole round of actions
// earlier, and a message passes all ranks in less.
int32_t rounds_of(const ScheduleShape& shape) {
  return std::max(1, shape.micro_batches / shape.ranks);
}

int32_t largest_round(const ScheduleShape& shape) {
  return (shape.micro_batches + rounds_of(shape) - 1) / rounds_of(shape);
}

struct StageMicroBatch {
  int32_t stage;
  int32_t micro_batch;
};

// Returns the order in which the stages of a rank take micro-batches.
std::vector<StageMicroBatch> interleaved_order(const ScheduleShape& shape, int32_t rank,
                                               bool is_backward) {
  std::vector<StageMicroBatch> order;
  const int32_t rounds = rounds_of(shape);
  int32_t first = 0;
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t count =
        shape.micro_batches / rounds + (round < shape.micro_batches % rounds ? 1 : 0);
    for (int32_t i = 0; i < shape.local_stages; ++i) {
      const int32_t local = is_backward ? shape.local_stages - 1 - i : i;
      for (int32_t k = first; k < first + count; ++k) {
        order.push_back({local * shape.ranks + rank, k});
      }
    }
    first += count;
  }
  return order;
}

}  // namespace

RankActions interleaved_actions(const ScheduleShape& shape, int32_t rank,
                                Interleaving interleaving) {
  const std::vector<StageMicroBatch> forwards = interleaved_order(shape, rank, false);
  const std::vector<StageMicroBatch> backwards = interleaved_order(shape, rank, true);
  const auto total = static_cast<int32_t>(forwards.size());
  const int32_t warm_up = std::min(total, (shape.local_stages - 1) * largest_round(shape) +
                                              interleaving.hop * (shape.ranks - 1 - rank));
  RankActions row;
  const auto add = [&](ActionKind kind, const StageMicroBatch& what) {
    row.push_back({what.stage, kind, what.micro_batch});
  };
  size_t weights = 0;
  const auto add_weight = [&] { add(ActionKind::kBackwardWeight, backwards[weights++]); };
  for (int32_t step = 0; step < total + warm_up; ++step) {
    if (step < total) add(ActionKind::kForward, forwards[static_cast<size_t>(step)]);
    const int32_t backward = step - warm_up;
    if (backward < 0) continue;
    add(interleaving.splits ? ActionKind::kBackwardInput : ActionKind::kBackward,
        backwards[static_cast<size_t>(backward)]);
    // A rank leaves as many W open as ranks are in front of it: they fill the bubble at the end.
    if (interleaving.splits && backward >= rank) add_weight();
  }
  while (interleaving.splits && weights < backwards.size()) add_weight();
  return row;
}

namespace {

RankActions one_f_one_b_actions(const ScheduleShape& shape, int32_t rank) {
  return interleaved_actions(shape, rank, {1, false});
}

RankActions interleaved_1f1b_actions(const ScheduleShape& shape, int32_t rank) {
  return interleaved_actions(shape, rank, {2, false});
}

RankActions zb_h1_actions(const ScheduleShape& shape, int32_t rank) {
  return interleaved_actions(shape, rank, {1, true});
}

struct ScheduleForm {
  std::string_view name;
  int32_t usual_stages;
  bool takes_any_stages;
  bool is_v;
  RankActions (*actions)(const ScheduleShape& shape, int32_t rank);  // null: zb-auto
};

constexpr std::array<ScheduleForm, 8> kForms{
    {{"gpipe", 1, false, false, looped_actions},
     {"1f1b", 1, false, false, one_f_one_b_actions},
     {"interleaved-1f1b", 2, true, false, interleaved_1f1b_actions},
     {"looped-bfs", 2, true, false, looped_actions},
     {"zb-h1", 1, true, false, zb_h1_actions},
     {"zb-v", 2, false, true, zb_v_actions},
     {"dualpipe-v", 2, false, true, dualpipe_v_actions},
     {"zb-auto", 1, true, false, nullptr}}};

const ScheduleForm& form_of(const std::string& name) {
  std::string names;
  for (const ScheduleForm& form : kForms) {
    if (form.name == name) return form;
    names += (names.empty() ? "" : ", ") + std::string(form.name);
  }
  refuse_pipeline("got the schedule '" + name + "', expected one of " + names,
                  "Pass one of these names, or a table as text.");
}

int64_t positive(const char* what, int64_t number) {
  if (number < 1) {
    refuse_pipeline("got " + std::to_string(number) + " " + what + ", expected 1 or more",
                    "Pass a positive number.");
  }
  return number;
}

ScheduleShape shape_of(const PipelineScheduleRequest& request, const ScheduleForm& form) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const int64_t ranks = positive("ranks", request.ranks);
  const int64_t micro_batches = positive("micro-batches", request.micro_batches);
  const int64_t stages =
      positive("stages per rank", request.stages_per_rank.value_or(form.usual_stages));
  if (!form.takes_any_stages && stages != form.usual_stages) {
    refuse_pipeline("got " + std::to_string(stages) + " stages per rank for '" +
                        std::string(form.name) + "', expected " + std::to_string(form.usual_stages),
                    "Take interleaved-1f1b, looped-bfs, zb-h1 or zb-auto for another number.");
  }
  if (ranks > kMost || stages > kMost / ranks || micro_batches > kMost / (ranks * stages)) {
    refuse_pipeline("got " + std::to_string(ranks) + " ranks, " + std::to_string(stages) +
                        " stages on each and " + std::to_string(micro_batches) +
                        " micro-batches, expected at most " + std::to_string(kMost) +
                        " forwards in all",
                    "Pass smaller numbers.");
  }
  return {static_cast<int32_t>(ranks), static_cast<int32_t>(stages),
          static_cast<int32_t>(micro_batches)};
}

// Returns the actions with I and W in place of each B.
RankActions with_split_backwards(const RankActions& row) {
  RankActions made;
  for (const PipelineAction& action : row) {
    if (action.kind == ActionKind::kBackward) {
      made.push_back({action.stage, ActionKind::kBackwardInput, action.micro_batch});
      made.push_back({action.stage, ActionKind::kBackwardWeight, action.micro_batch});
    } else {
      made.push_back(action);
    }
  }
  return made;
}

int64_t most_live(const std::vector<RankActions>& rows) {
  int64_t most = 0;
  for (const RankActions& row : rows) most = std::max(most, most_live(row));
  return most;
}

// Gives the schedule the shortest rows of zb-auto: the greedy ones, or those of another form with
// the same stages on each rank, where they keep to the limit. Fewer live activations win a tie.
void set_automatic_rows(PipelineSchedule& schedule, const PipelineScheduleRequest& request,
                        const ScheduleShape& shape) {
  const ScheduleCosts costs = request.costs.value_or(ScheduleCosts());
  check_costs(costs, schedule.stages);
  const int64_t limit = request.max_activations.value_or(0);
  if (request.max_activations && limit < shape.local_stages) {
    refuse_pipeline("got a limit of " + std::to_string(limit) +
                        " live activations, expected at least " +
                        std::to_string(shape.local_stages) + ", one for each stage of a rank",
                    "Raise max_activations, or put fewer stages on a rank.");
  }
  schedule.rows = greedy_rows(shape, costs, limit);
  std::pair<double, int64_t> best{makespan(schedule, costs), most_live(schedule.rows)};
  PipelineSchedule other = schedule;
  for (const auto form :
       {looped_actions, one_f_one_b_actions, interleaved_1f1b_actions, zb_h1_actions}) {
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      other.rows[static_cast<size_t>(rank)] = with_split_backwards(form(shape, rank));
    }
    const int64_t live = most_live(other.rows);
    if (limit > 0 && live > limit) continue;
    const std::pair<double, int64_t> found{makespan(other, costs), live};
    if (found >= best) continue;
    best = found;
    std::swap(schedule.rows, other.rows);
  }
}

}  // namespace

PipelineSchedule pipeline_schedule(const PipelineScheduleRequest& request) {
  const ScheduleForm& form = form_of(request.name);
  const ScheduleShape shape = shape_of(request, form);
  if (form.actions != nullptr && (request.costs || request.max_activations)) {
    refuse_pipeline(
        "got costs or max_activations for '" + request.name + "', whose order depends on neither",
        "Leave them out, or take zb-auto.");
  }
  PipelineSchedule schedule;
  schedule.ranks = shape.ranks;
  schedule.stages = int64_t{shape.ranks} * shape.local_stages;
  schedule.micro_batches = shape.micro_batches;
  for (int64_t stage = 0; stage < schedule.stages; ++stage) {
    const bool comes_back = form.is_v && stage >= shape.ranks;
    schedule.stage_rank.push_back(comes_back ? schedule.stages - 1 - stage : stage % shape.ranks);
  }
  if (form.actions == nullptr) {
    set_automatic_rows(schedule, request, shape);
  } else {
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      schedule.rows.push_back(form.actions(shape, rank));
    }
  }
  check_schedule(schedule);
  return schedule;
}

}  // namespace trireme
