#pragma once

#include <trireme/strategies/pipeline/schedule.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// An action with a place among all actions of all ranks. The parts of an overlap stand one by one.
struct FlatAction {
  ActionKind kind = ActionKind::kBubble;
  int32_t stage = -1;
  int32_t micro_batch = -1;
  int32_t rank = 0;
  int32_t column = 0;    // in the row of its rank, from 0 on
  int32_t together = 1;  // size of the group, from this one on, that begins when all of it can
  int32_t message = -1;  // sends: the number of earlier ones on this edge
};

// The actions of a schedule in one list, rank after rank, found by kind, stage and micro-batch in
// constant time. Where a table has no messages, the sends that it implies are in the list, too.
//
// Throws ValueError for what has no place in such a list: an action twice, on a rank that does not
// hold its stage, a stage or micro-batch that the schedule does not have.
class FlatSchedule {
 public:
  static constexpr int32_t kNone = -1;

  explicit FlatSchedule(const PipelineSchedule& schedule);

  int32_t ranks() const { return static_cast<int32_t>(rank_begin_.size()) - 1; }
  int32_t stages() const { return stages_; }
  int32_t micro_batches() const { return micro_batches_; }
  bool has_messages() const { return has_messages_; }
  // Returns whether any action is a backward; without one it is the table of an evaluation.
  bool has_backward() const;

  const std::vector<FlatAction>& actions() const { return actions_; }
  const FlatAction& at(int32_t action) const { return actions_[static_cast<size_t>(action)]; }
  int32_t rank_begin(int32_t rank) const { return rank_begin_[static_cast<size_t>(rank)]; }
  int32_t rank_end(int32_t rank) const { return rank_begin_[static_cast<size_t>(rank) + 1]; }

  // Returns the place of such an action, or kNone.
  int32_t find(ActionKind kind, int32_t stage, int32_t micro_batch) const;
  // Returns the B or I of a micro-batch: after this the stage before can go on.
  int32_t backward_of(int32_t stage, int32_t micro_batch) const;
  // Returns the last action of a micro-batch in a stage: B or W, or F where there is no backward.
  int32_t last_of(int32_t stage, int32_t micro_batch) const;

  int64_t rank_of(int32_t stage) const { return stage_rank_[static_cast<size_t>(stage)]; }
  // Returns whether messages go between a stage and the next one: they lie on different ranks.
  bool crosses(int32_t stage) const {
    return 0 <= stage && stage + 1 < stages_ && rank_of(stage) != rank_of(stage + 1);
  }
  // Returns the sends from a stage to the next one (`forward`) or to the one before, in their
  // order.
  const std::vector<int32_t>& sends(int32_t stage, bool forward) const {
    return sends_[static_cast<size_t>(2 * stage + (forward ? 0 : 1))];
  }

  // Returns "1F0 (rank 1, column 3)".
  std::string describe(int32_t action) const;

 private:
  void add_rank(const RankActions& row);
  void add(const PipelineAction& action, int32_t rank, int32_t column);
  void add_implied_send(FlatAction action);
  void keep(FlatAction action);
  size_t place(int32_t stage, int32_t micro_batch) const;

  int32_t stages_;
  int32_t micro_batches_;
  bool has_messages_;
  std::vector<int64_t> stage_rank_;
  std::vector<FlatAction> actions_;
  std::vector<int32_t> rank_begin_;
  // The place of each action, by kind, stage and micro-batch; empty for kinds that do not occur.
  std::array<std::vector<int32_t>, kActionKinds> found_;
  std::vector<std::vector<int32_t>> sends_;  // two lists per stage: onward and back
};

}  // namespace trireme
