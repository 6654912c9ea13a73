#pragma once

#include <trireme/sync/join.h>

#include <memory>
#include <string>

namespace trireme {

class ZeroOptimizer;

// A sharded optimizer in a join. A rank that has run out steps its shards: under stage 2 with the
// sums of the others' backwards, under stage 1 with the gradients that a rank with inputs has when
// it steps. Either is scaled as on the ranks with inputs.
class TRIREME_API ZeroJoin final : public Joinable {
 public:
  explicit ZeroJoin(ZeroOptimizer& optimizer) : optimizer_(optimizer) {}

  // The optimizer calls these first.
  void before_clip(double max_norm, double norm_type, bool error_if_nonfinite);
  void before_step();
  // Throws ValueError in a join under stage 2, before gradients() returns parts of gradients.
  void refuse_parts() const;

  std::shared_ptr<Communicator> join_communicator() const override;
  std::string describe(const JoinCall& call) const override;
  void enter_join(Join* join, const JoinOptions& options) override;
  void set_join_divisor(double divisor) override;
  void run_out() override;
  void follow(const JoinCall& call) override;
  void end_join(int64_t root) override;

 private:
  bool averages() const;  // stage 2

  ZeroOptimizer& optimizer_;
  Join* join_ = nullptr;
};

}  // namespace trireme
