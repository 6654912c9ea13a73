#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/kernels/optimizer_step.h>
#include <trireme/memory/host_store.h>
#include <trireme/memory/shard_plan.h>
#include <trireme/memory/tensor_samples.h>
#include <trireme/optim/grad_norm.h>
#include <trireme/strategies/zero/shard_delivery.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: the step of a sharded optimizer]
//
//   backward       stage 1: the user's gradients, whole on every rank (DDP averages them)
//                  stage 2: grad_hook -> bucket -> transport -> shard_delivery: shards of the
//                  average
//   begin_step     one small all-reduce, which returns when all ranks have come: no rank reads the
//                  parameters any more, and all know of errors on any
//   step           each rank's optimizer, over its shards
//   end_step       all ranks have written; parameters are whole
//
// Where the ranks share a host's memory, parameters lie in one HostStore: a shard is the place in
// it that its owner writes, and nothing is moved. Elsewhere parameters are private, and end_step
// gathers the shards.
//
// A write of the user into a parameter outside of this would be made by all ranks at once, into one
// memory; `x.mul_(2)` would come out multiplied by 2 to the world. So it raises, unless it is done
// between begin_writing() and end_writing(), where each rank writes a copy of its own.
//
// No version tells of a write through `.data`. So every rank samples all parameters, those of
// others too, when a step or writing is over, and compares before it comes to the next gate. That
// is safe although all see one memory: no step writes before all ranks have come to the gate, which
// is after they have compared, and none leaves it before all have written. If another rank writes
// while this one samples, this one may miss it, but the writer finds its own write, and one that
// finds something is enough, since all are told. After a step that an exception ended nothing is
// compared: others may have written before or after. See memory/tensor_samples.h for what samples
// find. Private parameters are sampled, too, if they are in CPU memory; on other devices each would
// take a kernel.
//
// Loading a state writes without reading, so give_own_memory() may come before it at any time: the
// parameters get private copies, and the next gate takes them in. What ranks bring in private
// memory, loaded or assigned (`p.data =`), must be the same bits on all of them.

struct ZeroOptions {
  // 1: optimizer state is sharded. 2: gradients too; they are averaged by this class, not by DDP.
  int64_t stage = 1;
  // Whether parameters lie in memory that the ranks of the host share, where that can be had.
  bool host_params = true;
  // How parameters are cut: kWhole for optimizers that need whole matrices; kDim0 if absent.
  std::optional<ShardPlacement> placement = std::nullopt;
  // Whether fused_adam_step() sums up the gradients while it steps: .grad stays undefined, and two
  // passes over the shards are spared. Needs stage 2, and ranks that share memory. Costs a ring of
  // 4 N bytes per rank.
  bool fused_step = false;
  // What gradients become on links between senders (grad/codes/compression.h); themselves if
  // absent. Needs stage 2: under stage 1 DDP has it. Each rank gets the means of whole buckets, of
  // which it keeps its shards; fused_step then has no sums to make.
  std::optional<Compression> compression = std::nullopt;
};

// A parameter group for fused_adam_step(): Adam's state of this rank's shards of `parameters`. Its
// lists are those of AdamLists, with steps on the CPU, or numbers.
struct FusedAdamGroup {
  std::vector<int64_t> parameters;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<at::Tensor> steps;
  std::vector<int64_t> step_numbers;
  AdamStepOptions options;
};

// This rank's knowledge when a step begins, which the other ranks may lack.
struct ZeroStep {
  bool found_inf = false;  // in this rank's gradients
  // The in-place writes that autograd has counted for each gradient if a GradScaler has written it.
  std::optional<uint32_t> scaler_writes = std::nullopt;
};

// The optimizer's part of ZeRO stages 1 and 2 (Rajbhandari et al., SC 2020;
// torch.distributed.optim.ZeroRedundancyOptimizer is stage 1). Both front doors wrap it.
//
// Cost per step and rank, N parameters of 4 bytes, P ranks: stage 1 moves nothing beyond DDP's
// all-reduce; stage 2 deposits 4 N bytes of gradients and sums up 4 N / P. Two small collectives.
// Without shared memory stage 2 reduce_scatters its gradients, up to three buckets of 25 MiB at a
// time (under another placement than kDim0 it all-reduces them), and owners broadcast 4 N bytes of
// parameters.
// Memory: parameters 4 N per host, gradients 4 N per rank (stage 1) or 4 N / P (stage 2, and rings
// of 8 MiB), the optimizer's state 1 / P of its size.
//
// Collective: the constructor, and every function that says so. Throws c10::ValueError on all ranks
// for parameters that differ between them; c10::DistBackendError as Communicator does.
class TRIREME_API Zero {
 public:
  // Ranks start from rank 0's values. Parameters become contiguous; their data moves, they remain
  // the same tensors.
  Zero(NamedParameters parameters, std::shared_ptr<Communicator> communicator,
       const ZeroOptions& options);

  // Returns the shards for this rank's optimizer: by parameter, a leaf with a storage of its own,
  // without elements where the rank owns none.
  const std::vector<at::Tensor>& shards() const { return shards_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const ShardPlan& plan() const { return *plan_; }
  const std::vector<ParameterInfo>& parameter_infos() const { return infos_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  bool shares_parameters() const { return store_ != nullptr; }

  // Gives each shard the matching part of its parameter's .grad, if any. Returns false if any rank
  // found an inf: then no rank may step. Throws c10::Error on all ranks if one has changed a
  // parameter or, under stage 2, a gradient in a way that the others cannot know. Collective.
  bool begin_step(const ZeroStep& step = {});
  // Ends the step. Collective, after begin_step() also where nothing was written.
  void end_step();
  // Called instead of end_step(), or before begin_step(), when an exception left the step: the
  // other ranks raise with the reason.
  void abandon_step(const std::string& reason) noexcept;

  // Between these two every rank may write parameters, all of them the same values: each writes a
  // copy of its own (4 N bytes meanwhile), and at the end all take over the owner's copy of each
  // shard. Collective.
  void begin_writing();
  void end_writing();
  bool is_writing() const { return writing_; }
  // Moves these parameters, by index, out of shared memory into copies of their own. These may be
  // written until the next begin_step() or begin_writing(), which takes in their values: the same
  // ones on all ranks, or all of them throw naming a parameter that differs, and again until they
  // agree. Leaves alone what lies elsewhere already, and what was written outside before. Not
  // collective.
  void give_own_memory(const std::vector<int64_t>& parameters);
  // Between these two each rank writes its shards() without reading a parameter, as loading does:
  // in place, without a copy. What an exception ends stays half written; abandon_step() tells the
  // others. Collective.
  void begin_writing_shards();
  void end_writing_shards();

  // stage 2

  // Sets whether backwards average gradients; if not, they accumulate on this rank.
  void set_synchronize(bool synchronize);
  // Return the reducer, and its BackwardTrigger; null under stage 1.
  GradReducer* reducer() { return reducer_.get(); }
  const std::shared_ptr<BackwardTrigger>& trigger() const { return trigger_; }

  // Returns what codes keep of gradients; nothing where nothing is compressed.
  std::vector<KeptCodes> kept_codes() const;

  // Returns whether the last backward has left the sums of gradients to fused_adam_step(); summed()
  // returns of which parameters. gradients() makes them after all.
  bool has_sums() const { return delivery_ && delivery_->has_sums(); }
  const std::vector<bool>& summed() const { return delivery_->summed(); }
  // Sums up, averages and steps every shard that a group holds, between begin_step() and
  // end_step().
  void fused_adam_step(const std::vector<FusedAdamGroup>& groups);

  // Returns this rank's part of the gradients of some parameters, for clip_grad_norm_
  // (grad_norm.h): its shards under stage 2, all of them under stage 1. begin_step() accepts what
  // is written to them; earlier changes it refuses on all ranks.
  GradNormPart gradients(const std::vector<int64_t>& parameters) const;
  void zero_grad(bool set_to_none = true);

  // Releases the parameters, which another Zero has taken over, the store and the hooks on
  // gradients. Under stage 2 it drops gradients, of which each rank has a part only. Nothing but
  // the destructor may be called then.
  void retire();

 private:
  // A rank's findings when it comes to the gate; all ranks get the highest of each. Only int64_t.
  // Parameters by index.
  struct Flags {
    int64_t unfit_parameter = -1;
    int64_t changed_parameter = -1;
    int64_t moved_parameter = -1;
    int64_t unfit_gradient = -1;
    int64_t changed_gradient = -1;
    int64_t found_inf = 0;
    // The factors by which this rank may have multiplied its gradients, in_order(); see
    // FactorRange. Ranks do not agree if the highest of the first is above the lowest of the
    // second.
    int64_t least_factor = in_order(FactorRange{}.least);
    int64_t minus_most_factor = -in_order(FactorRange{}.most);
  };
  static int64_t in_order(double number);
  Flags meet(Flags flags, const char* label);
  void check_options() const;
  void check_compression(const std::vector<bool>& sparse) const;
  int64_t agree_on_options() const;
  void move_into_store();
  void make_shards();
  void gather_shards();
  void copy_back();
  enum class Moved { kSameValues, kAnyValues };
  void agree_on_moved(const Flags& flags, Moved expected);
  bool has_own_memory(size_t parameter) const;
  void drop_writes();
  void snapshot_versions();
  std::vector<int64_t> changed_outside() const;
  void take_samples();
  int64_t written_unseen() const;
  void watch_gradients();
  SampledMemory gradient_memory(size_t parameter) const;
  FactorRange gradient_factor() const;
  void refuse(const Flags& flags);
  Flags look_at_parameters() const;
  bool is_moved(size_t parameter) const;
  bool is_fit(size_t parameter) const;
  bool has_fit_gradient(size_t parameter) const;
  const ShardRange& own(size_t parameter) const;
  at::Tensor own_gradient(size_t parameter) const;

  std::vector<at::Tensor> parameters_;
  std::vector<ParameterInfo> infos_;
  std::shared_ptr<Communicator> communicator_;
  ZeroOptions options_;
  std::shared_ptr<const ShardPlan> plan_;
  std::shared_ptr<HostStore> store_;
  std::vector<at::Tensor> places_;  // where each whole parameter lies
  std::vector<at::Tensor> shards_;
  std::vector<int64_t> versions_;       // autograd's, of private parameters; a store keeps its own
  std::vector<at::Tensor> own_memory_;  // copies by give_own_memory(), per parameter, or undefined
  TensorSamples samples_;               // samples of places_; none while a step writes
  std::shared_ptr<TensorSamples> delivered_;  // samples of own gradients, under stage 2
  // stage 2 only
  std::shared_ptr<BackwardTrigger> trigger_;
  std::shared_ptr<ShardDelivery> delivery_;
  std::shared_ptr<GradReducer> reducer_;
  GradientCoder* coder_ = nullptr;  // the reducer's; null where nothing is compressed
  bool writing_ = false;            // since begin_writing()
  bool scaler_wrote_ = false;
  bool steps_ = false;  // this step was not skipped
  int64_t step_ = 0;
};

}  // namespace trireme
