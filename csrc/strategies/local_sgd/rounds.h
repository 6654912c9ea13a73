#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/local_sgd/fragment_plan.h>
#include <trireme/strategies/local_sgd/round_options.h>
#include <trireme/strategies/local_sgd/worker_average.h>
#include <trireme/strategies/local_sgd/worker_ranks.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// A parameter that workers average.
struct RoundParameter {
  std::string name;      // in the plain model
  at::Tensor parameter;  // by which two rounds over one model know each other
  // What workers have agreed on last, of this rank's part; the outer optimizer steps it. Undefined
  // where another rank of this worker sends the parameter.
  at::Tensor anchor;
  int64_t sender = 0;  // that rank, where each rank of a worker has all of each parameter
};

// What a language's program does for rounds. Parameters are given by their indices.
class TRIREME_API RoundDoor {
 public:
  virtual ~RoundDoor() = default;
  // Returns this rank's parts of these parameters, in place; valid until the next step or write.
  // Throws ValueError if one was replaced.
  virtual std::vector<at::Tensor> values(const std::vector<size_t>& parameters) = 0;
  // Calls `write` where all ranks of the worker may write their parts. Collective over these ranks.
  virtual void write(const std::function<void()>& write) = 0;
  // Steps the anchors of these parameters, of a fragment, by their gradients.
  virtual void step_outer(size_t fragment, const std::vector<size_t>& parameters,
                          const std::vector<at::Tensor>& gradients) = 0;
};

// Where rounds are.
struct RoundState {
  int64_t steps = 0;  // since the begin
  int64_t step = 0;   // of this round
  int64_t round = 0;
  double weight = 1;  // of this worker in the next average
};

// A fragment that has come, and is not applied yet.
struct ArrivedFragment {
  size_t fragment = 0;
  // Of this rank's parts; absent if all weights were 0.
  std::optional<std::vector<at::Tensor>> means;
};

// The rounds of one rank; see [Note: rounds]. What workers send goes over a communicator of its
// own. One thread at a time.
//
// An error in a step, here or on another rank, ends the rounds: every later step throws, and no
// parameter has been written by the round that failed.
class TRIREME_API Rounds {
 public:
  struct Setup {
    RoundOptions options;
    std::vector<RoundParameter> parameters;
    std::vector<Fragment> fragments;
    WorkerRanks ranks;
    // What the ranks that have one place on different workers have alike, beside options and
    // parameters.
    std::string place;
    std::shared_ptr<RoundDoor> door;
  };
  // Throws ValueError as check_same_rounds() does. Collective over the ranks of all workers.
  explicit Rounds(Setup setup);

  // Opens the rounds. The first time workers begin at the parameters of the first one, unless
  // these are the same on all; then it is collective over all workers. Throws ValueError, naming a
  // parameter, if it is in other open rounds.
  void begin();
  // Waits for a fragment on its way, and closes the rounds; begin() may go on with them.
  void end();

  // Counts a step of the inner optimizer, after it. Collective over all workers where a fragment
  // leaves or is applied.
  void after_step();
  // Tells the other workers that this rank cannot go on, and why.
  void abandon(const std::string& reason) noexcept;

  // Sets the share of this worker in the next average to leave, alone. Throws ValueError for one
  // below 0.
  void set_weight(double weight);

  const RoundOptions& options() const { return setup_.options; }
  const std::vector<RoundParameter>& parameters() const { return setup_.parameters; }
  const std::vector<Fragment>& fragments() const { return setup_.fragments; }
  Communicator& workers() const { return average_.workers(); }
  GradientCoder* coder() const { return average_.coder(); }
  RoundDoor& door() const { return *setup_.door; }
  // Returns this rank's parameters of a fragment: those with an anchor.
  std::vector<size_t> own(const Fragment& fragment) const;
  // Returns all of this rank's parameters.
  std::vector<size_t> own() const;

  // For checkpoints.
  const RoundState& state() const { return state_; }
  // Waits for a fragment on its way, if there is one, and returns it.
  const std::optional<ArrivedFragment>& wait_for_fragment();
  // Goes on from there. The anchors are those of the checkpoint.
  void restore(const RoundState& state, std::optional<ArrivedFragment> arrived);
  // Makes the present parameters the anchors.
  void take_anchors();
  // Whether workers have agreed on where they begin, or have loaded that: before, there are no
  // anchors.
  bool has_agreed() const { return has_agreed_; }

 private:
  void advance();
  void advance_outer();
  void send(size_t fragment);
  void apply();
  void apply_means(const ArrivedFragment& arrived);
  void step_anchors(const ArrivedFragment& arrived, const std::vector<size_t>& parameters);
  void write_parameters(size_t fragment, const std::vector<size_t>& parameters);
  void spread(const Fragment& fragment);
  void agree_on_start();
  bool sends_differences() const;
  void check_usable() const;
  void open();
  std::string label_of(size_t fragment) const;

  Setup setup_;
  WorkerAverage average_;
  RoundState state_;
  bool has_agreed_ = false;
  std::optional<size_t> leaving_;  // the fragment on its way
  std::optional<ArrivedFragment> arrived_;
  std::string failure_;
  std::shared_ptr<Rounds*> open_;  // while they are open
};

}  // namespace trireme
