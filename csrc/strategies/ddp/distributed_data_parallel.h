#pragma once

#include <trireme/comm/c10d/comm_hook.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/module/averages_gradients.h>
#include <trireme/module/find_tensors.h>
#include <trireme/module/module_parameters.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/ddp/ddp.h>
#include <trireme/strategies/ddp/ddp_join.h>
#include <trireme/sync/no_sync.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace trireme {

// Returns the parameters (each tensor once, however often it is registered) and buffers of a
// module.
inline ModuleTensors module_tensors(const torch::nn::Module& module) {
  return {named_parameters(module), module.buffers()};
}

// Any DistributedDataParallel, whatever it wraps.
class HasDdp : public AveragesGradients {
 public:
  virtual Ddp& core() = 0;
  std::shared_ptr<Communicator> averages_over() override { return core().communicator(); }
};

// See DistributedDataParallel below.
template <typename Net>
class DistributedDataParallelImpl : public torch::nn::Module,
                                    public WrapsModule,
                                    public HasDdp,
                                    public HoldsCodes {
 public:
  DistributedDataParallelImpl(Net module, std::shared_ptr<Communicator> communicator,
                              const DdpOptions& options = {})
      : module_(register_module("module", std::move(module))),
        sync_buffers_(options.forward_sync_buffers),
        ddp_(module_tensors(*module_), std::move(communicator), options) {
    ddp_.reducer().watch_module(watch_parameters_of(children().front()));
    for (const auto& inside : children().front()->modules())
      if (auto* inner = dynamic_cast<HasDdp*>(inside.get())) ddp_.lead(inner->core());
  }

  // Trains over the group of the Context that trireme::init() returned.
  explicit DistributedDataParallelImpl(Net module, const DdpOptions& options = {})
      : DistributedDataParallelImpl(std::move(module), current_communicator(), options) {}

  // Runs the module; its backward leaves in every .grad the average over the ranks. Any arguments;
  // outputs may be tensors, or vectors, arrays, tuples, pairs, maps and optionals of them.
  template <typename... Args>
  auto forward(Args&&... args) {
    const bool with_gradients = at::GradMode::is_enabled();
    const bool is_held = ddp_.is_held();
    if (is_held && ddp_.has_averaged()) parameters_may_have_moved_ = true;
    if (with_gradients) ddp_.before_forward();
    join_.before_forward(sync_buffers_ && parameters_may_have_moved_ &&
                         !module_->buffers().empty());
    auto output = [&] {
      const auto running = ddp_.running();
      return module_->forward(std::forward<Args>(args)...);
    }();
    parameters_may_have_moved_ = with_gradients && synchronize_ && !is_held;
    if (with_gradients) ddp_.after_forward(find_tensors(output), synchronize_);
    return output;
  }

  // Forwards while the guard lives only accumulate gradients on this rank; the first one after it
  // averages what has come together:
  //   { auto guard = ddp->no_sync(); loss(ddp->forward(a)).backward(); }
  //   loss(ddp->forward(b)).backward();
  using NoSync = trireme::NoSync;
  [[nodiscard]] NoSync no_sync() { return NoSync(synchronize_); }

  // Calls `train`, whose loop may have another number of inputs on each rank; see sync/join.h:
  //   ddp->join([&] { for (auto& batch : *loader) step(batch); });
  // Afterwards all ranks have the parameters and buffers of a rank that trained to the end.
  void join(const std::function<void()>& train, const JoinOptions& options = {}) {
    trireme::join({*this}, train, options);
  }
  // Returns what trireme::join() takes.
  Joinable& joinable() { return join_; }

  // Replaces the all-reduce of each bucket, division included (see comm/c10d/comm_hook.h;
  // make_comm_hook() takes hooks written for torch's DDP). Once, before the first backward.
  void register_comm_hook(std::shared_ptr<CommHook> hook) { ddp_.set_comm_hook(std::move(hook)); }

  // Returns where the time of the last synchronized step went.
  StepReport last_step() const { return ddp_.reducer().last_step(); }

  Net& module() { return module_; }
  torch::nn::Module& wrapped() const override { return *children().front(); }
  Ddp& core() override { return ddp_; }
  std::vector<KeptCodes> kept_codes() const override { return ddp_.kept_codes(); }

 private:
  Net module_;
  bool sync_buffers_;
  bool synchronize_ = true;
  bool parameters_may_have_moved_ = true;
  Ddp ddp_;
  DdpJoin join_{ddp_, wrapped(), parameters_may_have_moved_};
};

// torch::nn::parallel has no such class; this is torch.nn.parallel.DistributedDataParallel for C++
// modules.
//
//   trireme::Context ctx = trireme::init();
//   trireme::DistributedDataParallel<Net> ddp(net);
//   auto loss = loss_of(ddp->forward(input));   // the loop stays as it was
//   loss.backward();
//   optimizer.step();
//
// `Net` is a module holder (TORCH_MODULE) or a shared_ptr to a module. The wrapper is itself a
// module that holds `net` under the name "module". Construct it on every rank, in the same order;
// destroy it before the Context shuts down. What it costs, throws and guarantees:
// strategies/ddp/ddp.h.
template <typename Net>
class DistributedDataParallel : public torch::nn::ModuleHolder<DistributedDataParallelImpl<Net>> {
 public:
  using torch::nn::ModuleHolder<DistributedDataParallelImpl<Net>>::ModuleHolder;
};

}  // namespace trireme
