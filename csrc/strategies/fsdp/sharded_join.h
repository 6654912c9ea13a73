#pragma once

#include <trireme/strategies/fsdp/sharded_root.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace trireme {

// A fully sharded model in a join: a rank that has run out takes part in forwards and backwards
// with zeros, and steps its shards.
class ShardedModule::Joining final : public Joinable {
 public:
  Joining(ShardedModule& model, Root& root) : model_(model), root_(root) {}
  bool is_in_join() const { return join_ != nullptr; }

  // Called before a clip, and before a write of `parameter` by an optimizer, which names all of its
  // parameters in their order. `unit` is the model or a unit in it.
  void before_clip(const ShardedModule& unit, const ClipOptions& options);
  void before_step(const at::Tensor& parameter);

  std::shared_ptr<Communicator> join_communicator() const override {
    return root_.core->communicator();
  }
  std::string describe(const JoinCall& call) const override;
  void enter_join(Join* join, const JoinOptions& options) override;
  void set_join_divisor(double divisor) override { root_.core->reducers().set_divisor(divisor); }
  void run_out() override;
  void follow(const JoinCall& call) override;
  void end_join(int64_t /*root*/) override { join_->share_options(optimizers_); }

 private:
  void before_pass(const Fsdp::PassStart& pass);
  void follow_backward(bool synchronizes, bool all_reduces);

  ShardedModule& model_;
  Root& root_;
  Join* join_ = nullptr;
  std::vector<torch::optim::Optimizer*> optimizers_;  // that hold parameters of the model
  struct Place {
    size_t optimizer = 0;
    bool is_first = false;  // it is the first of its parameters
  };
  std::unordered_map<const at::TensorImpl*, Place> optimizer_of_;
};

}  // namespace trireme
