#pragma once

#include <trireme/grad/codes/gradient_coder.h>
#include <trireme/grad/transport.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A transport that sends codes of gradients; see gradient_coder.h. A bucket is coded when it is
// complete, on the thread that runs backward or, where a host's ranks send together, on the one
// that waits; it is decoded when it is waited for. Where ranks keep shards of the sums, each gets
// all of a bucket, and then keeps its own: so results do not depend on shards.
class TRIREME_API CompressedTransport final : public Transport {
 public:
  CompressedTransport(const std::shared_ptr<Communicator>& ranks, const Compression& compression)
      : Transport(ranks, {.carries_map = false, .takes_runs = false}), coder_(ranks, compression) {}

  // Throws ValueError if gradients are sparse.
  void begin(const TransportStep& step) override;
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const TransportBucket& request) override;
  // No .grad gets what was sent, so it is left out as before.
  void unused(int64_t parameter) override {
    coder_.take_back((*tensors_)[static_cast<size_t>(parameter)]);
  }
  void delivered() override { coder_.end_step(); }
  void abandoned() override { coder_.take_back_all(); }
  SentCodes sent() const override { return coder_.sent(); }
  void announce_failure(const std::string& text) noexcept override;

  GradientCoder& coder() { return coder_; }

 private:
  bool is_of_step(const TransportBucket& request) const;
  [[noreturn]] void refuse(int64_t parameter) const;

  GradientCoder coder_;
  // the step that runs
  Buckets* buckets_ = nullptr;
  const std::vector<ParameterInfo>* infos_ = nullptr;
  const std::vector<at::Tensor>* tensors_ = nullptr;
  std::vector<bool> arrived_;  // by parameter
};

// Returns a transport over ranks that compress; null where there is one sender, so that nothing is
// sent. Throws ValueError for bad arguments.
TRIREME_API std::unique_ptr<CompressedTransport> make_compressed_transport(
    const std::shared_ptr<Communicator>& ranks, const Compression& compression);

}  // namespace trireme
