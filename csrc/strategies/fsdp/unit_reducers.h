#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/param/param_group.h>
#include <trireme/strategies/fsdp/all_reduce_hooks.h>
#include <trireme/strategies/fsdp/owner_delivery.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: units on several meshes]
//
// Units under one root may be shared by different ranks: those of a mixture of experts by fewer
// than the rest. Each such set of ranks has a gate, a reducer, and communicators of its own. Ranks
// that come to units in different orders, or leave some out, do not wait for each other crosswise,
// since
//
//   gathers    have one order, about which all ranks agree, whichever gather (param/prefetch.h)
//   gates      are passed in one order, all of them before forward and before the optimizer
//   gradients  go out in one order: those of the first reducer while backward runs, those of the
//              others, unless they stream through shared memory, when it is over. Only in the first
//              one does a rank wait for others before that

// The ranks that train some units.
struct FsdpRanks {
  std::shared_ptr<Communicator> communicator;  // joins all of them
  // The ranks that have the same shards, where more train than share the parameters (HSDP).
  std::shared_ptr<Communicator> replicates_with = nullptr;
  // The communicator that scatters gradients; that of the groups if null.
  std::shared_ptr<Communicator> scatters_with = nullptr;
};

// Averages the gradients of all units under one root, by a GradReducer for each set of ranks, armed
// together. See GradReducer for costs, threads, and what is thrown.
class TRIREME_API UnitReducers {
 public:
  struct Request {
    const std::vector<std::shared_ptr<ParamGroup>>& groups;
    const std::vector<std::string>& names;  // names of all parameters, group by group
    const std::vector<FsdpRanks>& ranks;
    const std::vector<size_t>& ranks_of;  // index into `ranks`, one per group
    const std::optional<Compression>& compression;
  };
  // Throws ValueError for a bad compression, c10::NotImplementedError for one of units on several
  // meshes.
  explicit UnitReducers(const Request& request);
  UnitReducers(const UnitReducers&) = delete;
  UnitReducers& operator=(const UnitReducers&) = delete;

  // Lets senders of codes meet, before ranks wait for each other elsewhere. Collective the first
  // time.
  void meet_senders();
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool all_found);
  // Sets whether backwards average at all, whatever the flags of units say.
  void set_synchronize(bool synchronize);
  // Returns whether the flags of any unit ask backwards to average.
  bool synchronizes() const { return any_synchronizes(*groups_); }
  void shadow_backward();
  void reduce_accumulated();
  // Returns whether parameters are trained and none got a gradient since they were reduced.
  bool lack_gradients() const;
  void announce_failure(const std::string& text) noexcept;  // to all ranks of all of them
  void drop_accumulated();

  // The callback is called when a backward is found to synchronize, before its first collective.
  void set_armed_callback(const std::function<void()>& callback) {
    for (const auto& part : parts_) part->armed = callback;
  }
  void set_divisor(double divisor);
  void set_memory_source(const BufferPool::Source& source);
  // The callback is called with indices into `names`.
  void set_delivered_callback(const GradReducer::DeliveredCallback& callback);
  // `groups` is called before each backward that synchronizes: it returns which groups this rank
  // has not used, and so will bring no gradients of. It may return fewer, or nothing.
  void ask_for_unused(const std::function<std::vector<bool>()>& groups);
  // The callback is called with what an all-reduce hook has thrown, before that leaves backward.
  void tell_hook_errors(std::function<void(const std::string& what)> callback);
  // See GradReducer::compare_numbers().
  void compare_numbers(const GatherHashCheck& comparison) {
    for (const auto& part : parts_) part->reducer->compare_numbers(comparison);
  }
  // Returns what codes keep; nothing where nothing is compressed.
  std::vector<KeptCodes> kept_codes() const;
  // Returns the report of all reducers together: bytes, buckets and times of communication are
  // sums.
  StepReport last_step() const;

 private:
  using Groups = std::vector<std::shared_ptr<ParamGroup>>;
  static bool any_synchronizes(const Groups& groups);

  // One reducer, with its part of the groups and parameters.
  struct Part {
    std::vector<size_t> groups;  // their places among all
    std::shared_ptr<const Groups> all;
    std::vector<int64_t> parameters;
    std::function<void()> armed;
    std::function<std::vector<bool>()> ask_for_unused;
    std::function<void(const std::string&)> tell_hook_error;
    bool has_hooks = false;
    std::shared_ptr<BackwardTrigger> trigger;
    std::shared_ptr<OwnerDelivery> delivery;
    std::shared_ptr<GradReducer> reducer;
    GradientCoder* coder = nullptr;     // the reducer's; null where nothing is compressed
    bool codes_shards = false;          // it codes these, not whole parameters
    std::vector<ParameterInfo> stored;  // parameters as they lie in memory
    OwnShards own;

    const ParamGroup& group(size_t place) const { return *(*all)[groups[place]]; }
    // Reads the flags of its units, when a backward begins that averages.
    void read_flags();
    void read_hooks();
    void read_unused() const;
    AllReduceHook telling(AllReduceHook hook) const;
  };
  static void make_reducer(const Request& request, Part& part);
  static std::unique_ptr<Transport> make_transport(const Request& request, Part& part);

  std::shared_ptr<const Groups> groups_;
  std::vector<std::shared_ptr<Part>> parts_;
};

}  // namespace trireme
