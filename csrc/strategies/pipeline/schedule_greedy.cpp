#include <trireme/strategies/pipeline/schedule_actions.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace trireme {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The next action of a rank, and the time at which it can begin.
struct GreedyChoice {
  double begin = kNever;
  ActionKind kind = ActionKind::kBubble;
  int32_t stage = -1;
};

// See [Note: the greedy schedule].
class GreedySchedule {
 public:
  // `fit` is the share of a W that a gap must have room for.
  GreedySchedule(const ScheduleShape& shape, const ScheduleCosts& costs, int64_t max_activations,
                 double fit)
      : shape_(shape),
        costs_(costs),
        max_activations_(max_activations),
        fit_(fit),
        stages_(shape.ranks * shape.local_stages),
        counts_(static_cast<size_t>(stages_)),
        input_at_(counts_.size() * static_cast<size_t>(shape.micro_batches), kNever),
        gradient_at_(input_at_.size(), kNever),
        ranks_(static_cast<size_t>(shape.ranks)),
        rows_(ranks_.size()) {
    std::fill_n(input_at_.begin(), shape.micro_batches, 0);
  }

  void run() {
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) choose(rank);
    const size_t all = 3 * input_at_.size();
    for (size_t done = 0; done < all; ++done) {
      const auto first = std::min_element(
          ranks_.begin(), ranks_.end(),
          [](const Rank& a, const Rank& b) { return a.choice.begin < b.choice.begin; });
      TORCH_INTERNAL_ASSERT(first->choice.begin < kNever);
      take_choice(static_cast<int32_t>(first - ranks_.begin()));
    }
  }

  double makespan() const {
    double last = 0;
    for (const Rank& rank : ranks_) last = std::max(last, rank.free_at);
    return last;
  }

  std::vector<RankActions> take_rows() { return std::move(rows_); }

 private:
  // The number of micro-batches of a stage whose F, I and W have been placed.
  struct Counts {
    int32_t forwards = 0;
    int32_t inputs = 0;
    int32_t weights = 0;
  };
  struct Rank {
    double free_at = 0;
    int64_t live = 0;
    std::vector<int32_t> opened;  // stages of I, in their order; those from `closed` on lack a W
    size_t closed = 0;
    GreedyChoice choice;
  };

  Counts& counts(int32_t stage) { return counts_[static_cast<size_t>(stage)]; }
  const Counts& counts(int32_t stage) const { return counts_[static_cast<size_t>(stage)]; }
  int32_t rank_of(int32_t stage) const { return stage % shape_.ranks; }
  size_t place(int32_t stage, int32_t micro_batch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(shape_.micro_batches) +
           static_cast<size_t>(micro_batch);
  }

  bool fits(int32_t rank, int32_t stage) const {
    if (max_activations_ == 0) return true;
    const int64_t live = ranks_[static_cast<size_t>(rank)].live + 1;
    const int32_t last_stage = stages_ - shape_.ranks + rank;
    const int32_t oldest = counts(last_stage).forwards;
    if (counts(stage).forwards == oldest) return live <= max_activations_;
    int64_t to_come = 0;  // forwards of the oldest micro-batch on this rank
    for (int32_t other = rank; other < stages_; other += shape_.ranks) {
      to_come += counts(other).forwards <= oldest ? 1 : 0;
    }
    return live + to_come <= max_activations_;
  }

  void choose(int32_t rank) {
    Rank& state = ranks_[static_cast<size_t>(rank)];
    GreedyChoice best;
    const auto offer = [&](double ready_at, ActionKind kind, int32_t stage) {
      const double begin = std::max(state.free_at, ready_at);
      const bool is_backward = kind == ActionKind::kBackwardInput;
      const bool wins_tie = is_backward || best.kind != ActionKind::kBackwardInput;
      if (begin < best.begin || (begin == best.begin && begin < kNever && wins_tie)) {
        best = {begin, kind, stage};
      }
    };
    for (int32_t stage = rank; stage < stages_; stage += shape_.ranks) {
      const Counts& done = counts(stage);
      if (done.forwards < shape_.micro_batches && fits(rank, stage)) {
        offer(input_at_[place(stage, done.forwards)], ActionKind::kForward, stage);
      }
      if (done.inputs < done.forwards) {
        offer(gradient_at_[place(stage, done.inputs)], ActionKind::kBackwardInput, stage);
      }
    }
    if (state.closed < state.opened.size()) {
      const int32_t stage = state.opened[state.closed];
      const double gap = best.begin - state.free_at;
      if (gap > 0 && gap >= fit_ * costs_.of(stage).weight) {
        best = {state.free_at, ActionKind::kBackwardWeight, stage};
      }
    }
    state.choice = best;
  }

  void take_choice(int32_t rank) {
    Rank& state = ranks_[static_cast<size_t>(rank)];
    const GreedyChoice choice = state.choice;
    Counts& done = counts(choice.stage);
    const StageCosts& costs = costs_.of(choice.stage);
    int32_t micro_batch = 0;
    if (choice.kind == ActionKind::kForward) {
      micro_batch = done.forwards++;
      ++state.live;
      state.free_at = choice.begin + costs.forward;
      deliver(choice, micro_batch);
    } else if (choice.kind == ActionKind::kBackwardInput) {
      micro_batch = done.inputs++;
      state.opened.push_back(choice.stage);
      state.free_at = choice.begin + costs.input;
      deliver(choice, micro_batch);
    } else {
      micro_batch = done.weights++;
      --state.live;
      ++state.closed;
      state.free_at = choice.begin + costs.weight;
    }
    rows_[static_cast<size_t>(rank)].push_back({choice.stage, choice.kind, micro_batch});
    choose(rank);
  }

  // Sets when the stage that goes on can begin: the next one, the one before, or, at the end of the
  // forward, this one.
  void deliver(const GreedyChoice& made, int32_t micro_batch) {
    const bool is_forward = made.kind == ActionKind::kForward;
    const bool turns = is_forward && made.stage + 1 == stages_;
    const int32_t to = turns ? made.stage : made.stage + (is_forward ? 1 : -1);
    if (to < 0) return;
    const int32_t rank = rank_of(made.stage);
    const double delay = rank_of(to) == rank ? 0 : costs_.message;
    auto& ready_at = is_forward && !turns ? input_at_ : gradient_at_;
    ready_at[place(to, micro_batch)] = ranks_[static_cast<size_t>(rank)].free_at + delay;
    if (rank_of(to) != rank) choose(rank_of(to));
  }

  const ScheduleShape& shape_;
  const ScheduleCosts& costs_;
  int64_t max_activations_;
  double fit_;
  int32_t stages_;
  std::vector<Counts> counts_;       // one per stage
  std::vector<double> input_at_;     // when F may begin, by stage and micro-batch
  std::vector<double> gradient_at_;  // when I may begin
  std::vector<Rank> ranks_;
  std::vector<RankActions> rows_;
};

}  // namespace

std::vector<RankActions> greedy_rows(const ScheduleShape& shape, const ScheduleCosts& costs,
                                     int64_t max_activations) {
  std::vector<RankActions> best;
  double shortest = kNever;
  for (const double fit : {1.0, 0.5, 0.0}) {
    GreedySchedule schedule(shape, costs, max_activations, fit);
    schedule.run();
    if (best.empty() || schedule.makespan() < shortest) {
      shortest = schedule.makespan();
      best = schedule.take_rows();
    }
  }
  return best;
}

}  // namespace trireme
