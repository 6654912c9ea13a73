#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/table_steps.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// Steps the values of a dense table with what workers push.
class TRIREME_API DenseSteps final : public TableSteps {
 public:
  // `store`: the values.
  DenseSteps(Parts parts, TablePlan plan, std::shared_ptr<HostStore> store);

  // Returns the values, over the store.
  const std::vector<at::Tensor>& values() const { return values_; }

  // Return views of the table's memory: a state of a tensor, in its shape, and how many steps each
  // of its blocks has made, as int64.
  at::Tensor state(int64_t state, int64_t tensor) const;
  at::Tensor step_counts(int64_t tensor) const;

  // bsp: adds `gradients` (one per tensor, or undefined) times `scale` to the half of this clock,
  // which must be free: bring_to(clock - 1).
  void deposit(const std::vector<at::Tensor>& gradients, double scale);
  void forget_deposit();
  // ssp and async: steps the values with `gradients` times `scale`, one block after the other. An
  // exception of a wait leaves the blocks before it stepped.
  void step_now(const std::vector<at::Tensor>& gradients, double scale, const WaitContext& context);

 private:
  void step_block(int64_t block, const ClockStep& step) override;
  std::string name_of(int64_t block) const override;
  OptimizerSegment segment_of(int64_t block) const;
  int64_t count_step(int64_t block);

  std::shared_ptr<HostStore> store_;
  std::vector<at::Tensor> values_;  // over the store
};

}  // namespace trireme::ps
