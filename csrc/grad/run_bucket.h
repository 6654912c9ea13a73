#pragma once

#include <trireme/grad/bucket.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

class BufferPool;

// Gradients as one run per rank: the buffer that a reduce_scatter sums up. See [Note: who owns a
// gradient's memory] in bucket.h.
class TRIREME_API RunBucket final : public Bucket {
 public:
  // Buffers come from `pool` and go back to it when the sums are there. Needs a plan in `own`.
  RunBucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
            const std::vector<ParameterInfo>& infos, OwnShards own,
            std::shared_ptr<BufferPool> pool);

  void begin_step(bool shadow) override;
  void complete(double scale) override;
  Pending reduce(Communicator& ranks, const std::string& label) override;
  void keep_own() override { buffer_.reset(); }
  at::Tensor spread_sum(size_t slot) override;
  using Bucket::own_sum;
  at::Tensor own_sum(size_t slot, at::IntArrayRef sizes, at::IntArrayRef strides) const override;
  at::Tensor own_sums() override { return sums(); }
  std::vector<at::Tensor> sums_of(const std::vector<bool>& chosen) override;
  // Returns the memory into which the reduce_scatter puts this rank's part of the sums.
  const at::Tensor& sums();

 private:
  struct Run {  // a slot's place in the run of each rank
    int64_t offset = 0;
    int64_t numel = 0;  // padding included
  };

  const at::Tensor& home() const override { return whole_; }
  void have_home() override;
  void write(size_t slot, const at::Tensor& grad, Write how) override;
  void allocate();
  ShardRange part_of(size_t slot, int64_t rank) const;
  std::vector<at::Tensor> runs_on_device();

  std::shared_ptr<BufferPool> pool_;
  std::vector<Run> runs_;
  int64_t run_numel_ = 0;
  at::Tensor sums_;
  at::Tensor whole_;  // full-shape gradients, zeros outside of this rank's part: lazy
};

}  // namespace trireme
