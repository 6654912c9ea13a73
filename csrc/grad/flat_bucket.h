#pragma once

#include <trireme/grad/bucket.h>

#include <string>
#include <vector>

namespace trireme {

// Gradients one behind the other as planned, and a tail: the buffer that an all-reduce or a stream
// of deposits sums up. See [Note: who owns a gradient's memory] in bucket.h.
class TRIREME_API FlatBucket final : public Bucket {
 public:
  // Its buffer is lazy if `own` has a plan.
  FlatBucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
             const std::vector<ParameterInfo>& infos, int64_t tail_numel, OwnShards own = {})
      : Bucket(std::move(plan), parameters, infos, tail_numel, std::move(own)),
        delivered_(slots_.size()) {}

  void begin_step(bool shadow) override;
  void complete(double scale) override;
  Pending reduce(Communicator& ranks, const std::string& label) override;
  void deliver(size_t slot, bool as_bucket_view) override;
  at::Tensor spread_sum(size_t slot) override;
  using Bucket::own_sum;
  at::Tensor own_sum(size_t slot, at::IntArrayRef sizes, at::IntArrayRef strides) const override;
  bool take_memory(Bucket& earlier) override;
  at::Tensor payload() const override { return buffer_.narrow(0, 0, plan_.numel); }

 private:
  bool is_range(const at::Tensor& grad, size_t slot) const override;
  void have_home() override;
  void write(size_t slot, const at::Tensor& grad, Write how) override;
  void allocate();
  bool continues(const FlatBucket& earlier) const;
  bool is_untouched(const at::Tensor& delivered, size_t slot) const;
  size_t count_uses(bool writes_to_gradients);
  void complete_on_device(double scale);

  std::vector<at::Tensor> delivered_;  // tensors that became .grad in an earlier step, by slot
};

}  // namespace trireme
