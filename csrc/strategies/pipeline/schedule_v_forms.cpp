#include <trireme/strategies/pipeline/schedule_actions.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace trireme {
namespace {

constexpr int kFirst = 0;   // the stage of a rank on the way down the V
constexpr int kSecond = 1;  // the one on the way back

// Writes the actions of a rank with two stages. Each stage counts its micro-batches by itself;
// those that the schedule does not have are counted and left out.
class VActions {
 public:
  VActions(const ScheduleShape& shape, int32_t rank)
      : micro_batches_(shape.micro_batches), stages_{rank, 2 * shape.ranks - 1 - rank} {}

  void add(ActionKind kind, int chunk) {
    const PipelineAction action = next(kind, chunk);
    if (is_there(action)) actions_.push_back(action);
  }

  void add_overlap(int forward, int backward) {
    PipelineAction overlap;
    overlap.kind = ActionKind::kOverlap;
    overlap.sub_actions = {next(ActionKind::kForward, forward),
                           next(ActionKind::kBackward, backward)};
    std::erase_if(overlap.sub_actions,
                  [&](const PipelineAction& action) { return !is_there(action); });
    if (overlap.sub_actions.size() == 2) {
      actions_.push_back(std::move(overlap));
    } else {
      for (const PipelineAction& action : overlap.sub_actions) actions_.push_back(action);
    }
  }

  // Adds the W that has been open for longest, if there is one.
  void add_open_weight() {
    if (closed_ < opened_.size()) add(ActionKind::kBackwardWeight, opened_[closed_++]);
  }

  int32_t forwards(int chunk) const { return counts_[chunk].forwards; }
  int32_t inputs(int chunk) const { return counts_[chunk].inputs; }
  int32_t weights(int chunk) const { return counts_[chunk].weights; }
  RankActions take() { return std::move(actions_); }

 private:
  struct Counts {
    int32_t forwards = 0;
    int32_t inputs = 0;
    int32_t weights = 0;
  };

  bool is_there(const PipelineAction& action) const { return action.micro_batch < micro_batches_; }

  PipelineAction next(ActionKind kind, int chunk) {
    Counts& counts = counts_[chunk];
    int32_t micro_batch = 0;
    if (kind == ActionKind::kForward) {
      micro_batch = counts.forwards++;
    } else if (kind == ActionKind::kBackwardWeight) {
      micro_batch = counts.weights++;
    } else {
      micro_batch = counts.inputs++;
      if (kind == ActionKind::kBackward) {
        ++counts.weights;
      } else {
        opened_.push_back(chunk);
      }
    }
    return {stages_[chunk], kind, micro_batch};
  }

  int32_t micro_batches_;
  std::array<int32_t, 2> stages_;
  std::array<Counts, 2> counts_;
  std::vector<int> opened_;  // stages of I whose W comes by add_open_weight(), in their order
  size_t closed_ = 0;
  RankActions actions_;
};

// Steps 6 to 8 of dualpipe_v_actions(): what is left are backwards, and W in their last bubbles.
void add_last_backwards(VActions& actions, const ScheduleShape& shape, int32_t rank) {
  const int32_t half = (rank + 1) / 2;
  bool splits = false;
  const auto add_backward = [&](int chunk) {
    actions.add(splits ? ActionKind::kBackwardInput : ActionKind::kBackward, chunk);
  };
  for (int32_t i = 0; i <= rank; ++i) {
    if (i == half && rank % 2 == 1) splits = true;
    add_backward(kSecond);
    if (i == half && rank % 2 == 0) splits = true;
    add_backward(kFirst);
  }
  for (int32_t i = 0; i < shape.ranks - rank - 1; ++i) {
    actions.add_open_weight();
    add_backward(kFirst);
  }
  for (int32_t i = 0; i <= rank; ++i) actions.add_open_weight();
}

}  // namespace

RankActions zb_v_actions(const ScheduleShape& shape, int32_t rank) {
  const int32_t count = std::max(2 * shape.ranks - 1, shape.micro_batches);
  VActions actions(shape, rank);
  const auto add_split = [&](int chunk) {
    actions.add(ActionKind::kBackwardInput, chunk);
    actions.add(ActionKind::kBackwardWeight, chunk);
  };
  for (int32_t i = 0; i < 2 * (shape.ranks - rank) - 1; ++i)
    actions.add(ActionKind::kForward, kFirst);
  for (int32_t i = 0; i < rank; ++i) {
    actions.add(ActionKind::kForward, kSecond);
    actions.add(ActionKind::kForward, kFirst);
  }
  for (int32_t i = 0; i < shape.ranks - rank; ++i) {
    actions.add(ActionKind::kForward, kSecond);
    add_split(kSecond);
  }
  while (actions.forwards(kSecond) < actions.forwards(kFirst) || actions.forwards(kFirst) < count) {
    if (actions.forwards(kFirst) < count) actions.add(ActionKind::kForward, kFirst);
    add_split(kFirst);
    actions.add(ActionKind::kForward, kSecond);
    add_split(kSecond);
  }
  for (int32_t i = 0; i < rank; ++i) {
    actions.add(ActionKind::kBackwardInput, kFirst);
    actions.add(ActionKind::kBackwardInput, kSecond);
  }
  for (int32_t i = 0; i < shape.ranks - rank; ++i) add_split(kFirst);
  for (const int chunk : {kSecond, kFirst}) {
    while (actions.weights(chunk) < actions.inputs(chunk))
      actions.add(ActionKind::kBackwardWeight, chunk);
  }
  return actions.take();
}

RankActions dualpipe_v_actions(const ScheduleShape& shape, int32_t rank) {
  const int32_t count = std::max(2 * shape.ranks, shape.micro_batches);
  const int32_t behind = shape.ranks - rank - 1;
  VActions actions(shape, rank);
  for (int32_t i = 0; i < 2 * behind; ++i) actions.add(ActionKind::kForward, kFirst);
  for (int32_t i = 0; i <= rank; ++i) {
    actions.add(ActionKind::kForward, kFirst);
    actions.add(ActionKind::kForward, kSecond);
  }
  for (int32_t i = 0; i < behind; ++i) {
    actions.add(ActionKind::kBackwardInput, kSecond);
    actions.add_open_weight();
    actions.add(ActionKind::kForward, kSecond);
  }
  for (int32_t i = 0; i < count - 2 * shape.ranks + rank + 1; ++i) {
    if (i == 0 && behind == 0) {  // the last rank has both at hand: one after the other is shorter
      actions.add(ActionKind::kForward, kFirst);
      actions.add(ActionKind::kBackward, kSecond);
    } else {
      actions.add_overlap(kFirst, kSecond);
    }
    actions.add_overlap(kSecond, kFirst);
  }
  for (int32_t i = 0; i < behind; ++i) {
    actions.add(ActionKind::kBackward, kSecond);
    actions.add_overlap(kSecond, kFirst);
  }
  add_last_backwards(actions, shape, rank);
  return actions.take();
}

}  // namespace trireme
