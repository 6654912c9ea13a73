#pragma once

#include <trireme/sync/join_meeting.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace trireme {

// [Note: ranks with different numbers of inputs]
//
// A rank that has run out of inputs takes part in the calls of the others, until all have run out:
// before each forward, backward, clipping and step all ranks meet in one small all-reduce, in which
// the ranks with inputs name the call. So steps of several backwards, backwards that do not
// synchronize, and several models and optimizers in any order are followed as they come. All ranks
// with inputs must make the same calls.
//
// In each step such a rank is told the data that it lacks: the options of the optimizer, which a
// learning-rate schedule changes, and under ZeRO stage 1 the gradients.
//
// torch.distributed.algorithms.Join for C++, whose options these are.

struct JoinOptions {
  bool enable = true;  // false: the loop runs without a join
  // Whether every rank raises as soon as one has run out, instead of going on without it.
  bool throw_on_early_termination = false;
  // The divisor of sums once some ranks have run out of inputs: all ranks, as if the others had
  // gradients of zero, or (false) only the ranks that still train.
  bool divide_by_initial_world_size = true;
  // The optimizers of fully sharded models, which a rank that has run out steps.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

class Join;

// A strategy as a join sees it: it tells its calls, and can follow those of other ranks.
class TRIREME_API Joinable {
 public:
  virtual ~Joinable() = default;
  virtual std::shared_ptr<Communicator> join_communicator() const = 0;
  virtual std::string describe(const JoinCall& call) const = 0;
  // Makes every further call go to `join` first; to none if it is null. Throws ValueError for a
  // strategy that cannot join.
  virtual void enter_join(Join* join, const JoinOptions& options) = 0;
  virtual void set_join_divisor(double divisor) = 0;
  // Called on a rank that has run out: once, then for each call of the others.
  virtual void run_out() {}
  virtual void follow(const JoinCall& call) = 0;
  // Called when all ranks have run out; `root` was among the last.
  virtual void end_join(int64_t /*root*/) {}
};

// One loop over uneven inputs. See join() below.
class TRIREME_API Join {
 public:
  // Throws ValueError for joinables that do not all have one communicator.
  Join(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  void run(const std::function<void()>& train);

  // Meets the other ranks, on one with inputs; does nothing on one that has run out. Returns the
  // call with the flags of all.
  JoinCall tell(const Joinable& who, JoinCall call);
  // Gives the options of `root` to the ranks that have run out. Every rank calls it.
  void share_options(const std::vector<torch::optim::Optimizer*>& optimizers);

  bool has_run_out() const { return has_run_out_; }  // this rank
  bool any_has_run_out() const { return meeting_.any_has_run_out(); }
  int64_t root() const { return meeting_.root(); }  // the lowest rank with inputs
  JoinMeeting& meeting() { return meeting_; }

 private:
  static std::shared_ptr<Communicator> common_communicator(const std::vector<Joinable*>& joinables);
  JoinCall meet(const std::optional<JoinCall>& own);
  void check_alike();
  std::string describe(const JoinCall& call, int64_t rank) const;
  void abandon(const std::string& reason) noexcept;
  Communicator& communicator() const { return *meeting_.communicator(); }

  std::vector<Joinable*> joinables_;
  JoinMeeting meeting_;
  JoinOptions options_;
  bool has_run_out_ = false;
  bool all_raise_ = false;
};

// A joinable, or an object that holds one: a model or optimizer of any strategy.
class JoinMember {
 public:
  template <typename One>
    requires(!std::same_as<std::remove_cv_t<One>, JoinMember>)
  JoinMember(One& one) : joinable_(of(one)) {}  // NOLINT(google-explicit-constructor)
  Joinable* get() const { return joinable_; }

 private:
  template <typename One>
  static Joinable* of(One& one) {
    if constexpr (requires { one.joinable(); }) {
      return &one.joinable();
    } else {
      return &one->joinable();
    }
  }
  Joinable* joinable_;
};

// Throws ValueError for a module in which a layer meets other ranks (SyncBatchNorm), as ranks
// without inputs would not come to it; not under throw_on_early_termination, which ends the loop.
TRIREME_API void refuse_meetings(const torch::nn::Module& module, const JoinOptions& options,
                                 const char* area, RankOf where);

// Calls `train`, whose loop may have another number of inputs on each rank, and returns when it has
// returned on all of them:
//
//   trireme::join({ddp, optimizer}, [&] { for (auto& batch : *loader) step(batch); });
//
// Every model and optimizer whose calls are collective is listed; all have one communicator. Costs
// a small all-reduce for each of their calls, and two gathers in a step once a rank has run out.
// Inside, forward, backward, clip_grad_norm_() and step() are followed by ranks that have run out;
// other collective calls (save_checkpoint, all_mean) belong behind it. Exceptions of `train` are
// rethrown, and end the group.
TRIREME_API void join(const std::vector<JoinMember>& members, const std::function<void()>& train,
                      const JoinOptions& options = {});

}  // namespace trireme
