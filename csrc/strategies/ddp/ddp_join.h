#pragma once

#include <trireme/strategies/ddp/ddp.h>
#include <trireme/sync/join.h>

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// DDP in a join: a rank that has run out takes part in the others' broadcasts of buffers, and
// contributes zeros to their backwards. At the end all ranks have the parameters and buffers of one
// that trained to the end.
class TRIREME_API DdpJoin final : public Joinable {
 public:
  // `buffers_may_differ` is set when a join begins and when it is over. All of these must outlive
  // this.
  DdpJoin(Ddp& ddp, const torch::nn::Module& module, bool& buffers_may_differ)
      : ddp_(ddp), module_(module), buffers_may_differ_(buffers_may_differ) {}

  // Called before each forward: broadcasts the buffers of one rank, if any rank wants it.
  void before_forward(bool sync_buffers);

  std::shared_ptr<Communicator> join_communicator() const override { return ddp_.communicator(); }
  std::string describe(const JoinCall& call) const override;
  void enter_join(Join* join, const JoinOptions& options) override;
  void set_join_divisor(double divisor) override { ddp_.reducer().set_divisor(divisor); }
  void follow(const JoinCall& call) override;
  void end_join(int64_t root) override { ddp_.sync_module(module_.buffers(), root); }

 private:
  Ddp& ddp_;
  const torch::nn::Module& module_;
  bool& buffers_may_differ_;
  Join* join_ = nullptr;
};

}  // namespace trireme
