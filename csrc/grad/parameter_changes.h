#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/backward_trigger.h>
#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/grad_delivery.h>
#include <trireme/grad/grad_hook.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/module/module_parameters.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: a module that changes]
//
// The layout of a step stays, so that all ranks have the same, whatever a user has changed before
// it: a parameter that no longer matches its slot (frozen, cast, of other sizes, in another order
// in memory, with gradients in another dtype) leaves the slot empty. A rank that has seen a change
// marks it in the used-map. Then all ranks compare their parameters when that backward ends, and
// reduce the gradients that the layout did not hold: .grad of those parameters is the average
// before backward returns.
//
// If some rank has other tensors than were planned (a replaced layer, load_state_dict(assign=True),
// an added or a removed one) or tensors of other sizes or strides, the ranks compare whole lists.
// If these are alike, the reducer begins anew with them, and rank 0's values of new tensors go to
// all; else every rank raises. A tensor is known by its identity, not by its name.
//
// A module is looked at when its forward is over, since a forward may register parameters itself.
// Tensors found then may only be lent (torch.func.functional_call puts other tensors in the place
// of parameters as long as the forward runs), so it is looked at again when the backward is armed.
// Until all have agreed, hooks on the added parameters arm a backward that reaches no other
// parameter, and record which of them were used.
//
// A parameter whose `.data` was given other memory of the same sizes is the same one, and its
// gradient is averaged as before. But a user that does so on one rank only, or with other values
// there, trains another model on each rank from then on. So ranks compare samples of parameters
// that lie elsewhere on some rank, and warn. It is no error: ranks that average models instead of
// gradients may mean it.

// Notices the user's changes to the parameters of a layout, and agrees on them with the other
// ranks. Not thread-safe; its reducer serialises access.
class TRIREME_API ParameterChanges {
 public:
  // All references must outlive this.
  struct Context {
    BucketLayout& layout;
    Communicator& communicator;
    const GradDelivery& delivery;
    GradSink& sink;  // newcomers have indices behind those of parameters
    std::string area;
    bool hooks_before = false;           // the sink hears of gradients before they are accumulated
    bool compares_moved_values = false;  // see GradReducerOptions
  };
  explicit ParameterChanges(Context context) : context_(std::move(context)) {}

  // Begins with the parameters that the layout has now: puts hooks on.
  void begin();
  void watch_module(ModuleWatch watch) { watch_ = std::move(watch); }
  // Stops comparing values: ranks may hold different ones from now on.
  void stop_comparing() { storages_.clear(); }

  // Finds the user's changes since the last look: frozen, unfrozen, cast, given data of other
  // sizes.
  void watch_parameters();
  // Finds parameters that the module has not had before, when a forward is over.
  void look_at_module();
  // Looks again when a backward is armed: a tensor lent for the length of a forward is no change.
  void look_again(bool shadow);
  // Leaves the slots of changed parameters empty, once the buckets have begun their step.
  void leave_out_changed();

  bool is_visited_by(const VisitedNodes& visited) const;
  // Notes that the gradient of a newcomer came. Returns its tensor.
  const at::Tensor& newcomer_came(size_t newcomer, bool has_gradient);

  // What the ranks have agreed on.
  struct Agreement {
    // The parameters to begin anew with; then adopt() is called with this.
    std::optional<NamedParameters> parameters;
    std::vector<int64_t> fresh;  // parameters that ranks did not have in common before
    std::vector<const c10::StorageImpl*> storages;
    // Parameters whose gradients this backward brought, but its layout did not hold, and which of
    // all parameters some rank used.
    std::vector<int64_t> left_out;
    std::vector<bool> used;
  };
  // Agrees on changes after some rank announced one: all ranks compare their parameters at the end
  // of this backward. A rank that is `late` has seen no change itself, and is about to begin
  // another backward. Collective. Throws ValueError on all ranks for changes that differ, or cannot
  // be followed.
  Agreement agree(bool late, int64_t step);
  // Broadcasts values of new parameters, once the layout has begun with them. Collective.
  void adopt(const Agreement& agreement);

 private:
  struct Newcomer {  // a parameter that is not planned yet
    at::Tensor tensor;
    GradHook hook;
    bool used = false;  // since the last synchronization
  };

  bool is_reshaped(size_t index) const;
  bool is_cast(size_t index) const;
  bool is_rearranged(size_t index) const;
  bool is_moved(size_t index) const;
  const at::Tensor& parameter(size_t index) const { return context_.layout.parameters()[index]; }
  RankOf where() const { return context_.communicator.rank_of(); }
  Agreement apply_states(const std::vector<ParameterState>& states, AgreedStates agreed,
                         int64_t step);
  void compare_moved_values(const std::vector<bool>& moved, int64_t step);
  ModuleNow now(bool late);
  Agreement replan(bool late);
  void check_replannable(const ParameterChange& change) const;
  bool was_used(const at::Tensor& newcomer) const;

  Context context_;
  std::vector<GradHook> hooks_;
  ModuleWatch watch_;
  std::optional<ModuleNow> present_;  // set if it is not as planned
  std::vector<Newcomer> newcomers_;
  // Each parameter's storage when ranks had the same values; empty if they are not compared.
  std::vector<const c10::StorageImpl*> storages_;
};

}  // namespace trireme
