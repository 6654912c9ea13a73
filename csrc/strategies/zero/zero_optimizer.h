#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/step_report.h>
#include <trireme/module/module_parameters.h>
#include <trireme/optim/flat_optimizer.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/zero/zero_cores.h>
#include <trireme/strategies/zero/zero_join.h>

#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme {

// The parameters of an optimizer, and their names in messages.
struct TRIREME_API ZeroParameters {
  // NOLINTBEGIN(google-explicit-constructor): one parameter of the optimizer, whatever it is
  ZeroParameters(std::vector<at::Tensor> parameters);
  ZeroParameters(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);
  ZeroParameters(const torch::nn::Module& module);  // names are the module's
  template <typename Module>
  ZeroParameters(const torch::nn::ModuleHolder<Module>& holder) : ZeroParameters(*holder) {}
  // NOLINTEND(google-explicit-constructor)

  std::vector<torch::optim::OptimizerParamGroup> groups;
  NamedParameters named;  // parameters of all groups, in their order
  // The name of a module inside that averages gradients by itself, if there is one.
  std::optional<std::string> averaging_module = {};
};

// ZeroRedundancyOptimizer<Optimizer> for any `Optimizer`: the part of it that is no template. See
// zero_redundancy_optimizer.h.
//
// One whose parameters another takes over (zero_cores.h) keeps what consolidate() brought, and
// throws from every other function. Throws ValueError for only some of another one's parameters.
class TRIREME_API ZeroOptimizer : public torch::optim::Optimizer,
                                  public ShardedOptimizer,
                                  public HoldsCodes {
 public:
  ~ZeroOptimizer() override;
  ZeroOptimizer(const ZeroOptimizer&) = delete;
  ZeroOptimizer& operator=(const ZeroOptimizer&) = delete;

  // Makes one step of all ranks together; when it returns every parameter is whole. Collective.
  // `closure` is called once, before anything is written. Throws c10::Error on all ranks if a
  // parameter was written outside or, under stage 2, a gradient changed; c10::DistBackendError if
  // another rank failed in its step.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Do the same as torch's, which they hide. add_param_group() is collective; called through
  // torch::optim::Optimizer it shards nothing, and step() refuses.
  void zero_grad(bool set_to_none = true);
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Scales the gradients of all parameters to a common norm of at most `max_norm`; returns the norm
  // before, the same on all ranks. See optim/grad_norm.h. Collective under stage 2.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                             bool error_if_nonfinite = false);
  // Returns this rank's part of the gradients, for trireme::clip_grad_norm_() over several
  // optimizers. Throws ValueError under stage 2 in a join, whose ranks without inputs do not follow
  // that.
  std::vector<GradNormPart> gradients() const;

  // Makes backwards, while the guard lives, only accumulate on this rank; the first one after it
  // averages what has come together. Throws ValueError under stage 1, where DDP has a no_sync().
  class NoSync {
   public:
    explicit NoSync(ZeroOptimizer& optimizer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    ZeroOptimizer& optimizer_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // While the guard lives every rank may write parameters in place, all of them the same values:
  //   { auto writing = optimizer.writing(); torch::load(net, "net.pt"); }
  // Collective at both ends, which wait until no rank reads the parameters and until all have
  // written; either may throw as step() does. Where an exception ends it the other ranks raise.
  class Writing {
   public:
    explicit Writing(ZeroOptimizer& optimizer);
    ~Writing() noexcept(false);
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    ZeroOptimizer& optimizer_;
    int exceptions_before_;
  };
  [[nodiscard]] Writing writing() { return Writing(*this); }

  // Returns, under stage 2, where the time of the last synchronized backward went. Throws
  // ValueError under stage 1.
  StepReport last_step() const;

  // Calls `train`, whose loop may have another number of inputs on each rank; see sync/join.h:
  //   optimizer.join([&] { for (auto& batch : *loader) step(batch); });
  // Under stage 1, where DistributedDataParallel averages: trireme::join({ddp, optimizer}, ...).
  void join(const std::function<void()>& train, const JoinOptions& options = {}) {
    trireme::join({*this}, train, options);
  }
  // Returns what trireme::join() takes.
  Joinable& joinable() {
    cores_->live();
    return join_;
  }

  // Brings the state of all shards to rank `to`, where save() then writes it. Collective. Costs the
  // state of all ranks once, on the wire and in the memory of `to`.
  void consolidate(int64_t to = 0);
  // Writes what consolidate() brought here last, as the plain optimizer over the same parameters
  // writes and reads it. Throws ValueError where that is nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Takes this rank's part of such an archive, be it ours, of any number of ranks, or the plain
  // optimizer's; on all ranks. Throws ValueError if it belongs to other parameters.
  void load(torch::serialize::InputArchive& archive) override;

  // Returns this rank's optimizer, over its shards. It holds the state; state() of this object is
  // empty.
  torch::optim::Optimizer& local() { return *local_; }
  // Returns the cores, with their claim on the parameters.
  ZeroCores& cores() const { return *cores_; }

 protected:
  using MakeLocal = std::function<std::unique_ptr<torch::optim::Optimizer>(
      const std::vector<torch::optim::OptimizerParamGroup>&)>;
  // The count_step() of an `Inner` that the fused step can stand in for: of the local optimizer,
  // for some shards of one of its groups.
  using CountStep = std::function<optim::AdamStates(torch::optim::Optimizer& local, size_t group,
                                                    const std::vector<at::Tensor>& shards)>;
  struct Setup {
    std::unique_ptr<torch::optim::OptimizerOptions> defaults;
    MakeLocal make_local;
    CountStep count_step;  // empty for any other
    std::shared_ptr<Communicator> communicator;
    ZeroOptions options;
  };
  ZeroOptimizer(ZeroParameters parameters, Setup setup);

 private:
  // These serve load_checkpoint() and save_checkpoint() (saving/module_checkpoint.h), which need no
  // gathered state. Writing goes as begin_writing_shards() of Zero says.
  torch::optim::Optimizer& stepping() override { return *local_; }
  void add_parts(HeldParts& parts) const override;
  std::vector<KeptCodes> kept_codes() const override { return cores_->kept_codes(); }
  void begin_writing() override;
  void end_writing() override;
  void abandon_writing(const std::string& reason) noexcept override {
    cores_->abandon_step(reason);
  }

  void add(NamedParameters parameters, const std::function<void()>& make);
  void make_together(const std::function<void()>& make);
  torch::optim::OptimizerParamGroup local_group(size_t group) const;
  void check_groups() const;
  void set_synchronize(bool synchronize);
  void step_sums();
  void drop_shards();
  void or_abandon(const std::function<void()>& call);
  std::vector<GradNormPart> parts_of_gradients() const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::shared_ptr<Communicator> communicator_;
  ZeroOptions options_;
  std::shared_ptr<ZeroCores> cores_;
  std::vector<int64_t> group_counts_;  // parameters, at the time of sharding
  std::unique_ptr<torch::optim::Optimizer> local_;
  CountStep count_step_;
  std::vector<ArchivedValues> consolidated_;  // one per parameter
  bool synchronize_ = true;
  ZeroJoin join_{*this};
};

}  // namespace trireme
