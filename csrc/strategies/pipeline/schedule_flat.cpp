#include <trireme/strategies/pipeline/schedule_flat.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>

namespace trireme {
namespace {

constexpr int64_t kMostActions = int64_t{1} << 28;

int64_t count_actions(const PipelineSchedule& schedule) {
  int64_t count = 0;
  for (const RankActions& row : schedule.rows)
    for (const PipelineAction& action : row)
      for_each_part(action, [&](const PipelineAction& part) {
        if (part.kind != ActionKind::kBubble) ++count;
      });
  return count;
}

// Tables of this class have stages * micro-batches entries, so there must be as many actions.
void check_sizes(const PipelineSchedule& schedule) {
  const int64_t actions = count_actions(schedule);
  const bool fits = 1 <= schedule.ranks && 1 <= schedule.stages && 1 <= schedule.micro_batches &&
                    actions <= kMostActions && schedule.stages <= actions / schedule.micro_batches;
  if (!fits) {
    refuse_pipeline("got a schedule of " + std::to_string(actions) + " actions for " +
                        std::to_string(schedule.ranks) + " ranks, " +
                        std::to_string(schedule.stages) + " stages and " +
                        std::to_string(schedule.micro_batches) +
                        " micro-batches, expected one forward for each stage and micro-batch",
                    "Count stages, micro-batches and ranks from 0 on, and leave none out.");
  }
  if (static_cast<int64_t>(schedule.rows.size()) != schedule.ranks ||
      static_cast<int64_t>(schedule.stage_rank.size()) != schedule.stages) {
    refuse_pipeline("got " + std::to_string(schedule.rows.size()) + " rows for " +
                        std::to_string(schedule.ranks) + " ranks, and ranks for " +
                        std::to_string(schedule.stage_rank.size()) + " of " +
                        std::to_string(schedule.stages) + " stages",
                    "Give a row to each rank and a rank to each stage.");
  }
}

}  // namespace

FlatSchedule::FlatSchedule(const PipelineSchedule& schedule) {
  check_sizes(schedule);
  stages_ = static_cast<int32_t>(schedule.stages);
  micro_batches_ = static_cast<int32_t>(schedule.micro_batches);
  has_messages_ = trireme::has_messages(schedule);
  stage_rank_ = schedule.stage_rank;
  sends_.resize(2 * static_cast<size_t>(stages_));
  for (const RankActions& row : schedule.rows) add_rank(row);
  rank_begin_.push_back(static_cast<int32_t>(actions_.size()));
}

void FlatSchedule::add_rank(const RankActions& row) {
  const auto rank = static_cast<int32_t>(rank_begin_.size());
  rank_begin_.push_back(static_cast<int32_t>(actions_.size()));
  for (size_t column = 0; column < row.size(); ++column) {
    if (row[column].kind == ActionKind::kBubble) continue;
    const size_t first = actions_.size();
    for_each_part(row[column], [&](const PipelineAction& part) {
      add(part, rank, static_cast<int32_t>(column));
    });
    const size_t end = actions_.size();
    if (end > first) actions_[first].together = static_cast<int32_t>(end - first);
    if (has_messages_) continue;
    for (size_t i = first; i < end; ++i) add_implied_send(actions_[i]);
  }
}

void FlatSchedule::add(const PipelineAction& action, int32_t rank, int32_t column) {
  const auto refuse = [&](const std::string& what) {
    refuse_pipeline("got " + trireme::to_string(action) + " in row " + std::to_string(rank + 1) +
                        ", column " + std::to_string(column + 1) + ", " + what,
                    "Correct the table.");
  };
  const bool is_counted = has_micro_batch(action.kind);
  if (action.stage < 0 || action.stage >= stages_ ||
      (is_counted && (action.micro_batch < 0 || action.micro_batch >= micro_batches_))) {
    refuse("expected a stage below " + std::to_string(stages_) + " and a micro-batch below " +
           std::to_string(micro_batches_));
  }
  if (rank_of(action.stage) != rank) {
    refuse("but rank " + std::to_string(rank_of(action.stage)) + " holds stage " +
           std::to_string(action.stage));
  }
  if (is_counted) {
    const int32_t before = find(action.kind, action.stage, action.micro_batch);
    if (before != kNone) refuse("which is already there: " + describe(before));
  }
  FlatAction flat;
  flat.kind = action.kind;
  flat.stage = action.stage;
  flat.micro_batch = is_counted ? action.micro_batch : -1;
  flat.rank = rank;
  flat.column = column;
  keep(flat);
}

void FlatSchedule::add_implied_send(FlatAction action) {
  const bool is_forward = action.kind == ActionKind::kForward;
  const bool is_backward =
      action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
  if (!(is_forward && crosses(action.stage)) && !(is_backward && crosses(action.stage - 1))) return;
  action.kind = is_forward ? ActionKind::kSendForward : ActionKind::kSendBackward;
  action.together = 1;
  keep(action);
}

void FlatSchedule::keep(FlatAction action) {
  const auto where = static_cast<int32_t>(actions_.size());
  if (action.kind == ActionKind::kSendForward || action.kind == ActionKind::kSendBackward) {
    const size_t edge =
        2 * static_cast<size_t>(action.stage) + (action.kind == ActionKind::kSendForward ? 0 : 1);
    action.message = static_cast<int32_t>(sends_[edge].size());
    sends_[edge].push_back(where);
  }
  if (action.micro_batch >= 0) {
    std::vector<int32_t>& found = found_[static_cast<size_t>(action.kind)];
    if (found.empty()) {
      found.assign(static_cast<size_t>(stages_) * static_cast<size_t>(micro_batches_), kNone);
    }
    found[place(action.stage, action.micro_batch)] = where;
  }
  actions_.push_back(action);
}

size_t FlatSchedule::place(int32_t stage, int32_t micro_batch) const {
  return static_cast<size_t>(stage) * static_cast<size_t>(micro_batches_) +
         static_cast<size_t>(micro_batch);
}

int32_t FlatSchedule::find(ActionKind kind, int32_t stage, int32_t micro_batch) const {
  const std::vector<int32_t>& found = found_[static_cast<size_t>(kind)];
  return found.empty() ? kNone : found[place(stage, micro_batch)];
}

int32_t FlatSchedule::backward_of(int32_t stage, int32_t micro_batch) const {
  const int32_t whole = find(ActionKind::kBackward, stage, micro_batch);
  return whole != kNone ? whole : find(ActionKind::kBackwardInput, stage, micro_batch);
}

int32_t FlatSchedule::last_of(int32_t stage, int32_t micro_batch) const {
  for (const ActionKind kind : {ActionKind::kBackward, ActionKind::kBackwardWeight}) {
    const int32_t found = find(kind, stage, micro_batch);
    if (found != kNone) return found;
  }
  return find(ActionKind::kForward, stage, micro_batch);
}

bool FlatSchedule::has_backward() const {
  return !found_[static_cast<size_t>(ActionKind::kBackward)].empty() ||
         !found_[static_cast<size_t>(ActionKind::kBackwardInput)].empty() ||
         !found_[static_cast<size_t>(ActionKind::kBackwardWeight)].empty();
}

std::string FlatSchedule::describe(int32_t action) const {
  const FlatAction& flat = at(action);
  const PipelineAction shown{flat.stage, flat.kind, flat.micro_batch};
  return trireme::to_string(shown) + " (rank " + std::to_string(flat.rank) + ", column " +
         std::to_string(flat.column + 1) + ")";
}

}  // namespace trireme
