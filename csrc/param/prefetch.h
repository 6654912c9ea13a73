#pragma once

// Parameter path 3/3. In: param_group.h  Out: forward and backward

#include <trireme/comm/communicator.h>
#include <trireme/comm/crossed_waits.h>
#include <trireme/comm/meeting_place.h>
#include <trireme/common/export.h>
#include <trireme/param/gather_log.h>
#include <trireme/param/gather_plans.h>
#include <trireme/param/param_group.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: in which order units are gathered]
//
// A gather is a collective, so all ranks must come to all of them in one order, and a rank that
// uses other units, or in another order, must not hang or mix up its data. So gathers go by plan.
// When a unit is needed, all units planned up to it are gathered; a rank also gathers units that it
// does not use, and at the end of a pass the rest. The first of the passes that begin at the same
// unit, with gradients or without, makes the plan: before each gather ranks tell each other which
// unit they need (one small collective), all of those are gathered, and so the plan is the same on
// all ranks. A backward's plan is the reverse of each forward's that it comes to, but for the unit
// at which that began: around all others, it is the first that backward comes to.
//
// Where the plan is known, the next units are on their way while one computes. Nothing else goes
// over the wire then.
//
// A unit that has no place in the plan any more, and is not there, makes a rank leave the plan. It
// must not gather by itself: a peer that goes on by the plan would gather another unit at this
// moment, and both would get parts of two units. So it waits until all ranks have left (by the
// Store, where nothing else can be met; meeting_place.h); ranks that were behind gather the units
// of the others, and from there on the pass is like a first one. For what becomes of the plan see
// [Note: plans that fail] in gather_plans.h.
//
// A unit gathered only for other ranks is freed at once if this rank cannot need it any more: after
// its pass, or in backward if no forward used it. Units skipped before that stay until the pass is
// over, since this rank may need them yet, in another order.
//
// With set_dynamic() there is no plan, and every pass is like the first: ranks may use different
// units.
//
// [Note: how ranks that differ find out]
//
// Inside of a pass they cannot gather different units, as all gather by one plan or by a fresh
// agreement. The pass itself may differ: one rank is in a forward and another one in a backward,
// one runs a part of the model and another one all of it. Then
//
//   they wait for each other: one has left its plan, or begins a kind of pass that it has not seen
//   yet, or gathers what the others do not. These are in other gathers, or reduce gradients. Within
//   two seconds one of them says who waits for what: [Note: crossed waits] in comm/crossed_waits.h
//
//   both gather by plan: each keeps a hash of all gathers, which is compared whenever ranks agree
//   about a unit, and at the end of each backward that averages gradients. There it travels in a
//   number that is sent in any case (grad/used_map.h). So such a backward raises, before its
//   gradients are stepped with, and names the first gather that differs. On devices that number is
//   read when the next backward begins, which raises
//
// Ranks that share no shards (replicas) need not gather alike, and are not compared.
//
// All ranks agree about which units are there when a pass begins: units that any rank needed and
// that are not resharded after forward. These are not gathered again until a rank writes. They
// agree as well about which gathers are of pieces ([Note: pieces] in gathered_params.h): kept
// pieces are forgotten at the end of a pass, or after a write.

// Decides which group is gathered next. Only groups that gather take part; the others are always
// there. One thread at a time.
class TRIREME_API Prefetch {
 public:
  // Takes groups on one device. All ranks find the order by `agrees_with`, or, if it is null, by
  // the communicator of the first group's gathers. Groups that gather with different communicators
  // need one of all their ranks.
  explicit Prefetch(const std::vector<std::shared_ptr<ParamGroup>>& groups,
                    const std::shared_ptr<Communicator>& agrees_with = nullptr);
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  // Begins a pass. `entry` is the group of the unit at which a forward begins, null for a unit
  // without one.
  void begin_forward(const ParamGroup* entry, bool trains);
  void begin_backward();
  // Notes that the backward has come to a forward, for the first time; `forward` is the value of
  // last_forward() in it.
  struct Forward {
    GatherPlans::Key key;
    int64_t number = 0;  // counts forwards
  };
  const Forward& last_forward() const { return forward_; }
  void enter_forward(const Forward& forward);
  // Notes that the backward computes a whole forward again that was without gradients (a reentrant
  // checkpoint around the outermost unit).
  void repeat_forward(const ParamGroup* entry);
  // Returns whether any group gathers.
  bool gathers() const { return !groups_.empty(); }
  // Returns the communicator by which ranks find the order; null if no group gathers.
  Communicator* communicator() const { return communicator_.get(); }
  // Returns whether this rank has needed the group's parameters since they were written; true for a
  // group that does not gather, which is not tracked.
  bool may_have_been_needed(const ParamGroup& group) const;
  bool is_in_pass() const { return pass_ != Pass::kNone; }

  // Waits until the group's parameters are there. All ranks must need the same group outside of a
  // pass; see above for one in a pass. Throws c10::DistBackendError if ranks differ, and the errors
  // of a gather.
  void need(ParamGroup& group);
  // Starts to gather the group's parameters for a caller that needs them later, and then calls
  // need(). Does not wait until they are there.
  void need_later(ParamGroup& group);
  // Reshards a unit that was needed in this pass and no longer is, unless it was gathered for a
  // further use, is held or is kept. With `hold` its memory stays until backward is over, which may
  // reach it unnoticed.
  void done(ParamGroup& group, bool hold = false);
  // Reshards a unit outside of a pass, even if it is kept; all ranks must call it. In a pass it
  // does what done() does.
  void drop(ParamGroup& group);
  // Starts to gather the rest of the plan, at once. Does nothing in a pass that makes its plan.
  void gather_rest();
  // Ends the pass on this rank: gathers the units that others may still need, one after another
  // (two are there at most), and reshards units that reshard after it. `is_last`, equal on all
  // ranks, says that no pass comes before the parameters are written, so that pieces are forgotten.
  void end_pass(bool is_last = false);
  // Forgets the pieces of all units, outside of a pass. All ranks call it between the same two
  // gathers.
  void forget_pieces();
  // Leaves the pass after an exception, and reshards all units. Learned plans stay, and so do
  // pieces: other ranks may not know of the exception.
  void reset() noexcept;
  // Forgets all gathered units, because the parameters were written.
  void expire();

  // Set the units that are gathered ahead, by plan, while `group` computes, up to the last of
  // `ahead` (none if it is empty). By default it is the next one. Groups that do not gather are
  // left out.
  void set_forward_prefetch(const ParamGroup& group, const std::vector<const ParamGroup*>& ahead);
  void set_backward_prefetch(const ParamGroup& group, const std::vector<const ParamGroup*>& ahead);
  void set_dynamic(bool dynamic);

  // Lets long waits of the communicator find out that ranks wait for each other crosswise. Called
  // alike on all ranks.
  void watch(const Communicator& communicator);
  // For ranks that compare all their gathers in a sum: a number that is equal if the gathers were;
  // the factor with which a sum of equal numbers is zero.
  int64_t gathered_hash() const { return log_.hash(); }
  int64_t share_in_sum() const;
  // Throws c10::DistBackendError naming the gather that differs between ranks. All ranks call it.
  [[noreturn]] void refuse_difference();

 private:
  using Pass = GatherLog::Pass;
  using Index = int64_t;
  using Plan = GatherPlans::Plan;
  struct State {
    int64_t claims = 0;     // places in the plan that were gathered and not needed yet
    bool is_kept = false;   // there, and not gathered again, until expire(); the same on all ranks
    bool is_held = false;   // there on this rank until backward is over
    bool was_used = false;  // a forward that trains used it since expire()
    bool was_needed = false;      // this rank needed it since expire()
    int64_t uses = 0;             // uses by forwards that train, since a backward ended
    std::vector<Index> ahead[2];  // forward, backward
    bool has_ahead[2] = {false, false};
  };

  Index index_of(const ParamGroup* group) const;
  State& state_of(Index index) { return states_[static_cast<size_t>(index)]; }
  void claim(Index index);
  bool comes_again(Index index) const;
  bool reshards(Index index) const;
  bool agree(Index wanted);
  void leave_plan(Index wanted);
  void learn_plan();
  int64_t meet(const std::string& why);
  std::optional<std::string> waits_in_vain();
  void gather(Index index);
  void gather_now(Index index);
  void gather_next();
  bool gather_up_to(Index index);
  void begin_pass(Pass pass);
  void gather_ahead(Index index);
  void gather_for_others(bool is_last);
  void leave(Index index, bool is_last);
  void drop_unused(Index index);
  void set_ahead(const ParamGroup& group, int which, const std::vector<const ParamGroup*>& ahead);

  std::vector<std::shared_ptr<ParamGroup>> groups_;
  std::shared_ptr<Communicator> communicator_;
  std::vector<State> states_;
  GatherPlans plans_;
  std::map<int64_t, Plan> gathered_;  // gathers of forwards that made their plans, by number
  bool dynamic_ = false;
  GatherLog log_;
  std::unique_ptr<MeetingPlace> meeting_;
  std::unique_ptr<CrossedWaits> crossed_;
  std::vector<std::shared_ptr<GroupHealth>> watched_;

  // the pass
  Pass pass_ = Pass::kNone;
  Forward forward_;      // the last one
  bool learns_ = false;  // this pass makes its plan
  Plan plan_;
  size_t next_ = 0;                        // place in plan_
  std::optional<GatherPlans::Left> left_;  // set while it is left, and afterwards
};

}  // namespace trireme
