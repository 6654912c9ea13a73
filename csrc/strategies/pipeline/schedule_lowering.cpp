#include <trireme/strategies/pipeline/schedule_lowering.h>

#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_check.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

namespace trireme {
namespace {

constexpr size_t kStagesAhead = 3;  // torch keeps the parameters of as many

RankActions compute_actions(const RankActions& row) {
  RankActions kept;
  std::copy_if(row.begin(), row.end(), std::back_inserter(kept),
               [](const PipelineAction& action) { return is_compute(action.kind); });
  return kept;
}

// Finds for each action of a rank the stages that are used next.
class StagesAhead {
 public:
  explicit StagesAhead(const RankActions& row) {
    size_t use = 0;
    for (size_t column = 0; column < row.size(); ++column) {
      for_each_part(row[column], [&](const PipelineAction& part) {
        uses_[part.stage].push_back({use++, column});
      });
    }
  }

  // Returns the stages that are used from `column` on, in this order: three of them, and those that
  // begin together with the third. Columns are asked for in ascending order.
  std::vector<int32_t> from(size_t column) {
    struct Next {
      Use use;
      int32_t stage;
    };
    std::vector<Next> next;
    for (auto& [stage, uses] : uses_) {
      size_t& passed = passed_[stage];
      while (passed < uses.size() && uses[passed].column < column) ++passed;
      if (passed < uses.size()) next.push_back({uses[passed], stage});
    }
    std::sort(next.begin(), next.end(),
              [](const Next& a, const Next& b) { return a.use.number < b.use.number; });
    std::vector<int32_t> stages;
    size_t last_column = 0;
    for (const Next& coming : next) {
      if (stages.size() >= kStagesAhead && coming.use.column != last_column) break;
      stages.push_back(coming.stage);
      last_column = coming.use.column;
    }
    return stages;
  }

 private:
  struct Use {
    size_t number;  // among all of the rank
    size_t column;
  };

  std::map<int32_t, std::vector<Use>> uses_;
  std::map<int32_t, size_t> passed_;
};

bool has(const std::vector<int32_t>& stages, int32_t stage) {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

// Adds UNSHARD and RESHARD, REDUCE_GRAD and WAIT_REDUCE_GRAD.
RankActions with_shards(const RankActions& row, int64_t micro_batches) {
  StagesAhead ahead(row);
  std::vector<int32_t> whole;
  std::map<int32_t, int64_t> backwards;
  RankActions made;
  for (size_t column = 0; column < row.size(); ++column) {
    const std::vector<int32_t> wanted = ahead.from(column);
    for (const int32_t stage : whole) {
      if (!has(wanted, stage)) made.push_back({stage, ActionKind::kReshard});
    }
    std::erase_if(whole, [&](int32_t stage) { return !has(wanted, stage); });
    for (const int32_t stage : wanted) {
      if (has(whole, stage)) continue;
      made.push_back({stage, ActionKind::kUnshard});
      whole.push_back(stage);
    }
    made.push_back(row[column]);
    for_each_part(row[column], [&](const PipelineAction& part) {
      const bool ends =
          part.kind == ActionKind::kBackward || part.kind == ActionKind::kBackwardWeight;
      if (!ends || ++backwards[part.stage] != micro_batches) return;
      made.push_back({part.stage, ActionKind::kReduceGrad});
      made.push_back({part.stage, ActionKind::kWaitReduceGrad});
    });
  }
  for (const int32_t stage : whole) made.push_back({stage, ActionKind::kReshard});
  return made;
}

// Places sends and receives: each rank in turn goes one action on, if what it needs was placed.
class MessagePlacement {
 public:
  MessagePlacement(const PipelineSchedule& schedule, std::vector<RankActions> rows)
      : schedule_(schedule),
        rows_(std::move(rows)),
        made_(rows_.size()),
        next_(rows_.size(), 0),
        has_input_(static_cast<size_t>(schedule.stages * schedule.micro_batches), false),
        has_gradient_(has_input_.size(), false) {}

  std::vector<RankActions> run() {
    bool goes_on = true;
    while (goes_on) {
      goes_on = false;
      for (size_t rank = 0; rank < rows_.size(); ++rank) goes_on |= advance(rank);
    }
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
      if (next_[rank] < rows_[rank].size()) refuse_overlap(rank);
    }
    return std::move(made_);
  }

 private:
  bool advance(size_t rank) {
    if (next_[rank] == rows_[rank].size()) return false;
    const PipelineAction& action = rows_[rank][next_[rank]];
    bool is_ready = true;
    for_each_part(action, [&](const PipelineAction& part) { is_ready &= can_run(part); });
    if (!is_ready) return false;
    made_[rank].push_back(action);
    for_each_part(action, [&](const PipelineAction& part) { hand_over(part, rank); });
    ++next_[rank];
    return true;
  }

  bool can_run(const PipelineAction& action) const {
    switch (action.kind) {
      case ActionKind::kForward:
        return action.stage == 0 || has_input_[place(action.stage, action.micro_batch)];
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        return action.stage + 1 == schedule_.stages ||
               has_gradient_[place(action.stage, action.micro_batch)];
      default:
        return true;
    }
  }

  // Gives what an action makes to the stage that uses it.
  void hand_over(const PipelineAction& action, size_t rank) {
    const bool is_forward = action.kind == ActionKind::kForward;
    const bool is_backward =
        action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
    const int32_t to = action.stage + (is_forward ? 1 : -1);
    if ((!is_forward && !is_backward) || to < 0 || to == schedule_.stages) return;
    (is_forward ? has_input_ : has_gradient_)[place(to, action.micro_batch)] = true;
    const auto peer = static_cast<size_t>(schedule_.stage_rank[static_cast<size_t>(to)]);
    if (peer == rank) return;
    const auto send = is_forward ? ActionKind::kSendForward : ActionKind::kSendBackward;
    const auto receive = is_forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
    made_[rank].push_back({action.stage, send, action.micro_batch});
    made_[peer].push_back({to, receive, action.micro_batch});
  }

  size_t place(int32_t stage, int32_t micro_batch) const {
    return static_cast<size_t>(stage * schedule_.micro_batches + micro_batch);
  }

  [[noreturn]] void refuse_overlap(size_t rank) const {
    refuse_pipeline("got " + to_string(rows_[rank][next_[rank]]) + " in the row of rank " +
                        std::to_string(rank) + ", which needs what it makes itself",
                    "Let the actions of an overlap belong to different micro-batches.");
  }

  const PipelineSchedule& schedule_;
  std::vector<RankActions> rows_;
  std::vector<RankActions> made_;
  std::vector<size_t> next_;
  std::vector<bool> has_input_;
  std::vector<bool> has_gradient_;
};

// Adds a wait for each send.
RankActions with_waits(const RankActions& row) {
  std::map<std::pair<int32_t, int32_t>, size_t> sent;  // forward sends without a wait yet
  std::vector<PipelineAction> open;                    // in the order of the sends
  std::vector<bool> is_open;
  RankActions made;
  for (const PipelineAction& action : row) {
    made.push_back(action);
    if (action.kind == ActionKind::kSendForward || action.kind == ActionKind::kSendBackward) {
      const bool is_forward = action.kind == ActionKind::kSendForward;
      if (is_forward) sent[{action.stage, action.micro_batch}] = open.size();
      open.push_back({action.stage,
                      is_forward ? ActionKind::kWaitSendForward : ActionKind::kWaitSendBackward,
                      action.micro_batch});
      is_open.push_back(true);
    }
    for_each_part(action, [&](const PipelineAction& part) {
      if (part.kind != ActionKind::kBackward && part.kind != ActionKind::kBackwardInput) return;
      const auto found = sent.find({part.stage, part.micro_batch});
      if (found == sent.end()) return;
      made.push_back(open[found->second]);
      is_open[found->second] = false;
      sent.erase(found);
    });
  }
  for (size_t i = 0; i < open.size(); ++i) {
    if (is_open[i]) made.push_back(open[i]);
  }
  return made;
}

// One rank sends nothing: its table is lowered if anything stands in it beside what computes.
bool is_lowered(const PipelineSchedule& schedule) {
  if (schedule.ranks > 1) return has_messages(schedule);
  const RankActions& row = schedule.rows.front();
  return std::any_of(row.begin(), row.end(), [](const PipelineAction& action) {
    return !is_compute(action.kind) && action.kind != ActionKind::kBubble;
  });
}

}  // namespace

PipelineSchedule lower_schedule(const PipelineSchedule& schedule) {
  check_schedule(schedule);
  if (is_lowered(schedule)) return schedule;
  PipelineSchedule lowered = schedule;
  for (RankActions& row : lowered.rows)
    row = with_shards(compute_actions(row), schedule.micro_batches);
  lowered.rows = MessagePlacement(schedule, std::move(lowered.rows)).run();
  for (RankActions& row : lowered.rows) row = with_waits(row);
  return lowered;
}

}  // namespace trireme
