#include <trireme/strategies/pipeline/schedule_run.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>
#include <string>
#include <utility>

namespace trireme {
namespace {

constexpr int32_t kNone = FlatSchedule::kNone;

// An action that another one waits for, and how long after its end the other one may begin.
struct Need {
  int32_t action;
  double delay;
};

class ScheduleRun {
 public:
  ScheduleRun(const FlatSchedule& flat, const ScheduleCosts& costs, int64_t slots)
      : flat_(flat),
        costs_(costs),
        slots_(slots),
        next_(static_cast<size_t>(flat.ranks())),
        blocker_(next_.size(), kNone),
        next_waiter_(next_.size(), kNone),
        free_at_(next_.size(), 0),
        waiters_(flat.actions().size(), kNone),
        is_done_(flat.actions().size(), false) {
    times_.begin.resize(flat.actions().size());
    times_.end.resize(flat.actions().size());
  }

  ScheduleTimes run() {
    for (int32_t rank = flat_.ranks(); rank-- > 0;) {
      next_[rank] = flat_.rank_begin(rank);
      awake_.push_back(rank);
    }
    while (!awake_.empty()) {
      const int32_t rank = awake_.back();
      awake_.pop_back();
      advance(rank);
    }
    for (int32_t rank = 0; rank < flat_.ranks(); ++rank) {
      if (next_[rank] != flat_.rank_end(rank)) refuse_circle(rank);
    }
    return std::move(times_);
  }

 private:
  // Runs a rank up to its end, or to an action that has to wait.
  void advance(int32_t rank) {
    for (int32_t& action = next_[rank]; action < flat_.rank_end(rank); ++action) {
      find_needs(action);
      const auto missing = std::find_if(needs_.begin(), needs_.end(),
                                        [&](const Need& need) { return !is_done_[need.action]; });
      if (missing != needs_.end()) {
        blocker_[rank] = missing->action;
        next_waiter_[rank] = std::exchange(waiters_[missing->action], rank);
        return;
      }
      finish(action);
    }
  }

  void finish(int32_t action) {
    const FlatAction& flat = flat_.at(action);
    double begin = free_at_[flat.rank];
    for (const Need& need : needs_) begin = std::max(begin, times_.end[need.action] + need.delay);
    times_.begin[action] = begin;
    times_.end[action] = free_at_[flat.rank] = begin + duration(flat);
    is_done_[action] = true;
    for (int32_t rank = waiters_[action]; rank != kNone; rank = next_waiter_[rank]) {
      awake_.push_back(rank);
    }
  }

  double duration(const FlatAction& action) const {
    const StageCosts& costs = costs_.of(action.stage);
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kRecompute:
        return costs.forward;
      case ActionKind::kBackward:
        return costs.input + costs.weight;
      case ActionKind::kBackwardInput:
        return costs.input;
      case ActionKind::kBackwardWeight:
        return costs.weight;
      default:
        return 0;
    }
  }

  void find_needs(int32_t action) {
    needs_.clear();
    const int32_t end = action + flat_.at(action).together;
    for (int32_t part = action; part < end; ++part) add_needs(flat_.at(part));
    // Parts of one overlap run one after the other and do not wait for each other.
    std::erase_if(needs_, [&](const Need& need) {
      return need.action == kNone || (action <= need.action && need.action < end);
    });
  }

  void add_needs(const FlatAction& action) {
    const int32_t stage = action.stage;
    const int32_t micro_batch = action.micro_batch;
    const auto need = [&](ActionKind kind, int32_t of_stage, double delay = 0) {
      needs_.push_back({flat_.find(kind, of_stage, micro_batch), delay});
    };
    switch (action.kind) {
      case ActionKind::kForward:
        need(ActionKind::kRecvForward, stage);
        if (flat_.crosses(stage - 1)) {
          need(ActionKind::kSendForward, stage - 1, costs_.message);
        } else if (stage > 0) {
          need(ActionKind::kForward, stage - 1);
        }
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        need(ActionKind::kForward, stage);
        need(ActionKind::kRecompute, stage);
        need(ActionKind::kRecvBackward, stage);
        if (flat_.crosses(stage)) {
          need(ActionKind::kSendBackward, stage + 1, costs_.message);
        } else if (stage + 1 < flat_.stages()) {
          needs_.push_back({flat_.backward_of(stage + 1, micro_batch), 0});
        }
        break;
      case ActionKind::kBackwardWeight:
        need(ActionKind::kBackwardInput, stage);
        break;
      case ActionKind::kRecompute:
        need(ActionKind::kForward, stage);
        break;
      case ActionKind::kSendForward:
        need(ActionKind::kForward, stage);
        need_slot(action, stage + 1);
        break;
      case ActionKind::kSendBackward:
        needs_.push_back({flat_.backward_of(stage, micro_batch), 0});
        need_slot(action, stage - 1);
        break;
      case ActionKind::kWaitSendForward:
        need(ActionKind::kSendForward, stage);
        need(ActionKind::kRecvForward, stage + 1);
        break;
      case ActionKind::kWaitSendBackward:
        need(ActionKind::kSendBackward, stage);
        need(ActionKind::kRecvBackward, stage - 1);
        break;
      default:
        break;
    }
  }

  void need_slot(const FlatAction& send, int32_t receiver) {
    if (slots_ == 0 || send.message < slots_) return;
    const auto& sends = flat_.sends(send.stage, send.kind == ActionKind::kSendForward);
    const int32_t before = sends[static_cast<size_t>(send.message - slots_)];
    needs_.push_back({flat_.last_of(receiver, flat_.at(before).micro_batch), 0});
  }

  // A blocked rank waits for an action of a rank that is blocked, too: so their chain closes.
  [[noreturn]] void refuse_circle(int32_t rank) const {
    std::vector<bool> is_seen(next_.size(), false);
    while (!is_seen[rank]) {
      is_seen[rank] = true;
      rank = flat_.at(blocker_[rank]).rank;
    }
    const int32_t first = rank;
    std::string circle;
    do {
      if (!circle.empty()) circle += "; ";
      circle += flat_.describe(next_[rank]) + " waits for " + flat_.describe(blocker_[rank]);
      rank = flat_.at(blocker_[rank]).rank;
    } while (rank != first);
    std::string got = "got a schedule that never ends";
    if (slots_ > 0) got += " with " + std::to_string(slots_) + " slots for each edge";
    refuse_pipeline(got + ": " + circle,
                    "Move one of these actions behind what comes to it from another rank.");
  }

  const FlatSchedule& flat_;
  const ScheduleCosts& costs_;
  int64_t slots_;
  ScheduleTimes times_;
  std::vector<int32_t> awake_;
  // Per rank: the next action, the one that it waits for, and the next rank that waits for that
  // one.
  std::vector<int32_t> next_;
  std::vector<int32_t> blocker_;
  std::vector<int32_t> next_waiter_;
  std::vector<double> free_at_;
  // Per action: the first rank that waits for it.
  std::vector<int32_t> waiters_;
  std::vector<bool> is_done_;
  std::vector<Need> needs_;  // what find_needs() found
};

}  // namespace

ScheduleTimes run_schedule(const FlatSchedule& flat, const ScheduleCosts& costs, int64_t slots) {
  return ScheduleRun(flat, costs, slots).run();
}

}  // namespace trireme
