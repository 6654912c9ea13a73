#pragma once

#include <trireme/grad/across.h>
#include <trireme/grad/wire.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A wire with one collective per bucket, in place: an all-reduce of a flat or a sparse one, a
// reduce_scatter of runs. Extra memory: none.
class TRIREME_API CollectiveWire final : public Wire {
 public:
  // Sums buckets up over `sharers`, or all `ranks` if that is null, and then this rank's part
  // `across`, if there is such a stage.
  explicit CollectiveWire(const std::shared_ptr<Communicator>& ranks,
                          std::shared_ptr<Communicator> sharers = nullptr,
                          std::unique_ptr<Across> across = nullptr)
      : Wire(ranks, {.may_become_stream = across == nullptr}),
        sharers_(sharers ? std::move(sharers) : ranks),
        across_(std::move(across)) {}

  void begin(const WireStep& step) override;
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const WireBucket& request) override;
  Pending across(std::vector<at::Tensor> sums, const std::string& label) override;
  bool launch_waits() const override { return sharers_->scatter_waits(); }
  void announce_failure(const std::string& text) noexcept override;

 private:
  std::shared_ptr<Communicator> sharers_;
  std::unique_ptr<Across> across_;
  Buckets* buckets_ = nullptr;
  double scale_ = 1;
  const UsedMap* map_ = nullptr;
  bool shadow_ = false;
};

}  // namespace trireme
