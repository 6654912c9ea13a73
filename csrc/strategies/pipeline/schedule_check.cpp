#include <trireme/strategies/pipeline/schedule_check.h>

#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_run.h>

#include <algorithm>
#include <string>
#include <utility>

namespace trireme {
namespace {

// Checks one stage and micro-batch after the other: which actions there are, and in which order.
// All actions of a stage are on one rank, so their places in the list tell which comes first.
class PassageCheck {
 public:
  explicit PassageCheck(const FlatSchedule& flat)
      : flat_(flat), has_backward_(flat.has_backward()) {}

  void run() {
    for (stage_ = 0; stage_ < flat_.stages(); ++stage_) {
      for (micro_batch_ = 0; micro_batch_ < flat_.micro_batches(); ++micro_batch_) {
        check_forward();
        if (has_backward_) check_backward();
        if (flat_.has_messages()) check_messages();
      }
    }
  }

 private:
  int32_t find(ActionKind kind) const { return flat_.find(kind, stage_, micro_batch_); }

  std::string name(ActionKind kind) const {
    return to_string(PipelineAction{stage_, kind, micro_batch_});
  }

  [[noreturn]] void refuse(const std::string& what) const {
    refuse_pipeline("got a schedule in which " + what + " (rank " +
                        std::to_string(flat_.rank_of(stage_)) + " holds stage " +
                        std::to_string(stage_) + ")",
                    "Let each micro-batch pass every stage once: F, then B, or I and later W.");
  }

  void expect(ActionKind kind) const {
    if (find(kind) == FlatSchedule::kNone) refuse("there is no " + name(kind));
  }

  void expect_order(ActionKind first, ActionKind second) const {
    if (find(first) > find(second)) {
      refuse(flat_.describe(find(second)) + " comes before " + flat_.describe(find(first)));
    }
  }

  void check_forward() const {
    expect(ActionKind::kForward);
    if (find(ActionKind::kRecompute) == FlatSchedule::kNone) return;
    expect_order(ActionKind::kForward, ActionKind::kRecompute);
    const int32_t backward = flat_.backward_of(stage_, micro_batch_);
    if (backward < find(ActionKind::kRecompute)) {
      refuse(name(ActionKind::kRecompute) + " has no backward behind it");
    }
  }

  void check_backward() const {
    if (find(ActionKind::kBackward) != FlatSchedule::kNone) {
      for (const ActionKind half : {ActionKind::kBackwardInput, ActionKind::kBackwardWeight}) {
        if (find(half) != FlatSchedule::kNone) {
          refuse("there are both " + name(ActionKind::kBackward) + " and " + name(half));
        }
      }
      expect_order(ActionKind::kForward, ActionKind::kBackward);
      return;
    }
    if (find(ActionKind::kBackwardWeight) == FlatSchedule::kNone) expect_whole_backward();
    expect(ActionKind::kBackwardInput);
    expect_order(ActionKind::kForward, ActionKind::kBackwardInput);
    expect_order(ActionKind::kBackwardInput, ActionKind::kBackwardWeight);
  }

  void expect_whole_backward() const {
    if (find(ActionKind::kBackwardInput) != FlatSchedule::kNone) {
      expect(ActionKind::kBackwardWeight);
    }
    expect(ActionKind::kBackward);
  }

  void check_messages() const {
    for (const ActionKind kind :
         {ActionKind::kSendBackward, ActionKind::kRecvBackward, ActionKind::kWaitSendBackward}) {
      if (!has_backward_ && find(kind) != FlatSchedule::kNone) {
        refuse("there is " + name(kind) + " and no backward");
      }
    }
    if (flat_.crosses(stage_)) {
      expect(ActionKind::kSendForward);
      if (has_backward_) expect(ActionKind::kRecvBackward);
    }
    if (flat_.crosses(stage_ - 1)) {
      expect(ActionKind::kRecvForward);
      if (has_backward_) expect(ActionKind::kSendBackward);
    }
  }

  const FlatSchedule& flat_;
  bool has_backward_;
  int32_t stage_ = 0;
  int32_t micro_batch_ = 0;
};

// Returns the stage between which and the next one a message goes.
int32_t edge_of(const FlatAction& action) {
  switch (action.kind) {
    case ActionKind::kSendForward:
    case ActionKind::kWaitSendForward:
    case ActionKind::kRecvBackward:
      return action.stage;
    default:
      return action.stage - 1;
  }
}

void check_edges(const FlatSchedule& flat) {
  for (size_t i = 0; i < flat.actions().size(); ++i) {
    const FlatAction& action = flat.actions()[i];
    if (!is_message(action.kind) || flat.crosses(edge_of(action))) continue;
    refuse_pipeline("got " + flat.describe(static_cast<int32_t>(i)) +
                        ", but no other rank is on the other side of stage " +
                        std::to_string(action.stage),
                    "Leave out messages within a rank and beyond the first and last stage.");
  }
}

// Follows, rank after rank, which stages have their parameters and whose gradients are reduced.
class StageStates {
 public:
  explicit StageStates(const FlatSchedule& flat)
      : flat_(flat), stages_(static_cast<size_t>(flat.stages())) {}

  void run() {
    for (int32_t i = 0; i < static_cast<int32_t>(flat_.actions().size()); ++i) follow(i);
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      if (stages_[stage].reduction != Reduction::kPending) continue;
      const PipelineAction wait{static_cast<int32_t>(stage), ActionKind::kWaitReduceGrad, -1};
      if (waits_are_there()) refuse_pipeline("got no " + to_string(wait), kNextStep);
    }
  }

 private:
  enum class Shards { kUnknown, kWhole, kGone };
  enum class Reduction { kNone, kPending, kDone };
  struct Stage {
    Shards shards = Shards::kUnknown;
    Reduction reduction = Reduction::kNone;
    int32_t backwards = 0;
  };
  static constexpr std::string_view kNextStep =
      "Let UNSHARD, what computes, REDUCE_GRAD, WAIT_REDUCE_GRAD and RESHARD follow each other.";

  // Tables of torch before 2.15 have REDUCE_GRAD without a wait.
  bool waits_are_there() const {
    return std::any_of(
        flat_.actions().begin(), flat_.actions().end(),
        [](const FlatAction& action) { return action.kind == ActionKind::kWaitReduceGrad; });
  }

  void expect(bool is_right, int32_t action, const char* why) const {
    if (!is_right) refuse_pipeline("got " + flat_.describe(action) + ", but " + why, kNextStep);
  }

  void follow(int32_t i) {
    const FlatAction& action = flat_.at(i);
    Stage& stage = stages_[static_cast<size_t>(action.stage)];
    switch (action.kind) {
      case ActionKind::kUnshard:
        expect(stage.shards != Shards::kWhole, i, "its parameters are there");
        stage.shards = Shards::kWhole;
        break;
      case ActionKind::kReshard:
        expect(stage.shards == Shards::kWhole, i, "no UNSHARD comes before it");
        stage.shards = Shards::kGone;
        break;
      case ActionKind::kReduceGrad:
        expect(stage.backwards == flat_.micro_batches(), i, "backwards of its stage follow");
        expect(stage.reduction == Reduction::kNone, i, "it is not the first one");
        stage.reduction = Reduction::kPending;
        break;
      case ActionKind::kWaitReduceGrad:
        expect(stage.reduction == Reduction::kPending, i, "no REDUCE_GRAD comes before it");
        stage.reduction = Reduction::kDone;
        break;
      default:
        if (!is_compute(action.kind)) break;
        expect(stage.shards != Shards::kGone, i, "the parameters of its stage have gone");
        if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight) {
          ++stage.backwards;
        }
    }
  }

  const FlatSchedule& flat_;
  std::vector<Stage> stages_;
};

void check_ranks(const FlatSchedule& flat) {
  for (int32_t rank = 0; rank < flat.ranks(); ++rank) {
    if (flat.rank_begin(rank) < flat.rank_end(rank)) continue;
    refuse_pipeline("got no action for rank " + std::to_string(rank) + ": " +
                        std::to_string(flat.stages()) + " stages for " +
                        std::to_string(flat.ranks()) + " ranks",
                    "Give each rank a stage, or use fewer ranks.");
  }
}

// Returns how many messages were sent and not yet used up, at most. Slots are taken in turn, so one
// that is used up before those in front of it stays taken.
int64_t slots_of(const FlatSchedule& flat, const ScheduleTimes& times, PipelineEdge edge) {
  const auto from = static_cast<int32_t>(edge.from);
  const auto to = static_cast<int32_t>(edge.to);
  const std::vector<int32_t>& sends = flat.sends(from, to > from);
  const auto freed_at = [&](size_t message) {
    const int32_t micro_batch = flat.at(sends[message]).micro_batch;
    return times.end[static_cast<size_t>(flat.last_of(to, micro_batch))];
  };
  size_t oldest = 0;
  size_t most = 0;
  for (size_t i = 0; i < sends.size(); ++i) {
    const double sent_at = times.end[static_cast<size_t>(sends[i])];
    while (oldest < i && freed_at(oldest) <= sent_at) ++oldest;
    most = std::max(most, i - oldest + 1);
  }
  return static_cast<int64_t>(most);
}

}  // namespace

void check_whole(const FlatSchedule& flat) {
  check_ranks(flat);
  check_edges(flat);
  PassageCheck(flat).run();
  StageStates(flat).run();
}

std::vector<EdgeSlots> check_schedule(const PipelineSchedule& schedule, int64_t slots) {
  if (slots < 0) {
    refuse_pipeline("got " + std::to_string(slots) + " slots, expected 1 or more",
                    "Pass 0 for any number.");
  }
  const FlatSchedule flat(schedule);
  check_whole(flat);
  const ScheduleCosts unit;
  const ScheduleTimes times = run_schedule(flat, unit);
  if (slots > 0) run_schedule(flat, unit, slots);
  std::vector<EdgeSlots> edges;
  for (int64_t stage = 0; stage + 1 < schedule.stages; ++stage) {
    if (!flat.crosses(static_cast<int32_t>(stage))) continue;
    const PipelineEdge onward{stage, stage + 1};
    const PipelineEdge back{stage + 1, stage};
    for (const PipelineEdge& edge : {onward, back}) {
      const int64_t least = slots_of(flat, times, edge);
      if (least > 0) edges.push_back({edge, least});
    }
  }
  return edges;
}

}  // namespace trireme
