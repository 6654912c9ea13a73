#include <trireme/common/trace.h>
#include <trireme/strategies/zero/zero.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {
namespace {

// One shard as the kernel takes it, without a gradient.
struct Target {
  OptimizerSegment segment;
  at::ScalarType dtype = at::kFloat;  // real
  AdamScalars scalars{};
};

// Returns the number of this step for a parameter of `group`; counts it up where it is a tensor.
double count_up(const FusedAdamGroup& group, size_t index) {
  if (group.steps.empty()) return static_cast<double>(group.step_numbers[index]);
  const at::Tensor& step = group.steps[index];
  if (step.scalar_type() == at::kDouble) return *step.mutable_data_ptr<double>() += 1;
  return *step.mutable_data_ptr<float>() += 1;
}

void* memory_of(const std::vector<at::Tensor>& states, size_t index) {
  return states.empty() ? nullptr : states[index].mutable_data_ptr();
}

}  // namespace

void Zero::fused_adam_step(const std::vector<FusedAdamGroup>& groups) {
  TRIREME_TRACE("zero.fused_adam_step");
  std::vector<Target> targets(parameters_.size());
  for (const FusedAdamGroup& group : groups) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor& shard = shards_[static_cast<size_t>(group.parameters[i])];
      Target& target = targets[static_cast<size_t>(group.parameters[i])];
      target.segment = {.param = shard.mutable_data_ptr(),
                        .grad = nullptr,
                        .exp_avg = memory_of(group.exp_avgs, i),
                        .exp_avg_sq = memory_of(group.exp_avg_sqs, i),
                        .max_exp_avg_sq = memory_of(group.max_exp_avg_sqs, i),
                        .numel = shard.numel() * (shard.is_complex() ? 2 : 1)};
      target.dtype = c10::toRealValueType(shard.scalar_type());
      target.scalars = adam_scalars(group.options, count_up(group, i));
    }
  }
  delivery_->visit_sums([&](const SumPiece& sums) {
    const Target& target = targets[static_cast<size_t>(sums.parameter)];
    if (target.segment.param == nullptr) return;  // its group does not train it
    const SegmentDtypes dtypes{target.dtype, sums.values.dtype};
    OptimizerSegment segment =
        slice(target.segment, dtypes, sums.begin, sums.begin + sums.values.numel);
    segment.grad = sums.values.data;
    adam_segment(segment, dtypes, target.scalars);
  });
}

}  // namespace trireme
