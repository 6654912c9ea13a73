#pragma once

#include <trireme/grad/bucket.h>

#include <string>
#include <utility>
#include <vector>

namespace trireme {

// One sparse gradient, for strategies without shards. See [Note: who owns a gradient's memory] in
// bucket.h.
class TRIREME_API SparseBucket final : public Bucket {
 public:
  SparseBucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
               const std::vector<ParameterInfo>& infos)
      : Bucket(std::move(plan), parameters, infos, /*tail_numel=*/0, {}) {}

  void begin_step(bool shadow) override;
  void gradient_arrived(size_t slot, double /*scale*/) override { note_arrived(slot); }
  void complete(double scale) override;
  Pending reduce(Communicator& ranks, const std::string& label) override;
  void take_result(const at::Tensor& result) override { buffer_ = result; }
  void deliver(size_t slot, bool as_bucket_view) override;
  bool holds_gradient_of(const at::Tensor& /*parameter*/) const override { return false; }
};

}  // namespace trireme
