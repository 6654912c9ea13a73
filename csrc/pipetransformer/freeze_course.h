#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/optim/grad_norm.h>
#include <trireme/pipetransformer/freeze_rule.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

struct FreezeOptions {
  // The share of the layers still trained that one interval freezes at most; between 0 and 1.
  double alpha = 1.0 / 3;
  std::string rule = "gradient";  // or "schedule"; see [Note: freezing from the bottom up]
  // A rule of one's own, in place of that: returns how many layers are to be frozen, the same on
  // all ranks, at least as many as are.
  std::function<int64_t(const FreezePoint&)> choose = {};
  // Gradients are measured in the first step of an interval, and in each step so many behind it.
  int64_t measure_every = 16;
  int64_t hold = 0;         // intervals at the beginning in which nothing is frozen
  bool eval_frozen = true;  // whether frozen layers are in evaluation mode
};

// How far freezing has come, as it is saved.
struct FreezeState {
  std::vector<std::string> layers = {};
  int64_t frozen = 0;
  std::vector<int64_t> history = {};  // how many were frozen behind each advance()
};

// The course of freezing: counts steps, sums up norms, and decides, on all ranks alike, how many
// layers are frozen. It knows layers by their names only; who owns it freezes them. One thread at a
// time.
class TRIREME_API FreezeCourse {
 public:
  // `ranks`: all that train the model together; null for one process. Throws ValueError for options
  // and layers that cannot be used, and on all ranks for such that differ between ranks. Collective
  // over `ranks`: one gather of a number where all is well.
  FreezeCourse(std::vector<std::string> layers, FreezeOptions options,
               std::shared_ptr<Communicator> ranks);

  // Begins a step; returns whether its gradients are to be measured.
  bool begin_step();
  // Adds the squares of gradients: those of layer l are what this rank has in parts[l]. No
  // collective.
  void measure(const std::vector<std::vector<GradNormPart>>& parts);

  // Ends an interval; returns how many layers are frozen from now on. `keeps_last`: whether this
  // rank trains nothing but layers; where all do so, the last layer stays. Collective: one gather
  // of a number, for the history, and where gradients were measured one all-reduce of a number per
  // layer. Throws ValueError on all ranks, and changes nothing, where ranks have different
  // histories, or a rule of one's own has no use for what it sees.
  int64_t advance(bool keeps_last);
  // Leaves `stay` layers frozen, and begins the interval anew. Throws ValueError for more than are.
  void unfreeze(int64_t stay);

  int64_t frozen() const { return state_.frozen; }
  const std::vector<int64_t>& history() const { return state_.history; }
  const FreezeOptions& options() const { return options_; }

  const FreezeState& state() const { return state_; }
  // Goes on from a state, with a new interval. Throws ValueError for one of other layers.
  void load(const FreezeState& state);

 private:
  bool measures() const;
  std::string text() const;
  RankOf where() const;
  int64_t layers() const { return static_cast<int64_t>(state_.layers.size()); }
  // Returns whether any rank has set the flag.
  bool agree(const std::string& own, bool flag);
  std::vector<double> norms();
  int64_t decide(const std::vector<double>& norms);
  int64_t chosen(const FreezePoint& point);
  void begin_interval();
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  FreezeOptions options_;
  std::shared_ptr<Communicator> ranks_;
  FreezeState state_;
  int64_t steps_ = 0;     // of this interval
  int64_t measured_ = 0;  // of these
  at::Tensor squares_;    // per layer, fp64, this rank's part
};

}  // namespace trireme
