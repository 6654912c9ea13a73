#pragma once

#include <trireme/grad/outer_all_reduce.h>
#include <trireme/grad/transport.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A transport with one collective per bucket, in place: an all-reduce of a flat or a sparse one, a
// reduce_scatter of runs. Extra memory: none.
class TRIREME_API CollectiveTransport final : public Transport {
 public:
  // Sums buckets up over `sharers`, or all `ranks` if that is null, and then this rank's part
  // `outer`, if there is such a stage.
  explicit CollectiveTransport(const std::shared_ptr<Communicator>& ranks,
                               std::shared_ptr<Communicator> sharers = nullptr,
                               std::unique_ptr<OuterAllReduce> outer = nullptr)
      : Transport(ranks, {.may_become_stream = outer == nullptr}),
        sharers_(sharers ? std::move(sharers) : ranks),
        outer_(std::move(outer)) {}

  void begin(const TransportStep& step) override;
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const TransportBucket& request) override;
  Pending reduce_outer(Bucket& bucket, const std::vector<bool>& slots,
                       const std::string& label) override;
  bool launch_waits() const override { return sharers_->scatter_waits(); }
  void announce_failure(const std::string& text) noexcept override;

 private:
  std::shared_ptr<Communicator> sharers_;
  std::unique_ptr<OuterAllReduce> outer_;
  Buckets* buckets_ = nullptr;
  double scale_ = 1;
  const UsedMap* map_ = nullptr;
  bool shadow_ = false;
};

}  // namespace trireme
