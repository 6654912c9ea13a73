#pragma once

#include <trireme/grad/codes/gradient_coder.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/grad/collective_transport.h>
#include <trireme/grad/transport.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// A transport whose second stage sends codes: the ranks that share parameters sum up as in a
// CollectiveTransport, and what each has of the sums is coded on its way to the ranks that have the
// same shards (HSDP). A shard is coded as if it were the parameter: blocks begin at its first
// element. Whether a parameter goes as fp32 is decided by its largest shard.
class TRIREME_API ReplicaCodesTransport final : public Transport {
 public:
  struct Ranks {
    std::shared_ptr<Communicator> all;
    std::shared_ptr<Communicator> sharers;   // of parameters
    std::shared_ptr<Communicator> replicas;  // with the same shards: several senders
  };
  // `shards` are this rank's, by parameter.
  ReplicaCodesTransport(const Ranks& ranks, const Compression& compression,
                        std::vector<CodedShard> shards)
      : Transport(ranks.all),
        inner_(ranks.all, ranks.sharers),
        coder_(ranks.replicas, compression),
        shards_(std::move(shards)),
        sharers_(ranks.sharers->world()) {}

  void begin(const TransportStep& step) override;
  // Throws ValueError for a sparse gradient.
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const TransportBucket& request) override { return inner_.launch(request); }
  Pending reduce_outer(Bucket& bucket, const std::vector<bool>& slots,
                       const std::string& label) override;
  void unused(int64_t parameter) override {
    coder_.take_back((*tensors_)[static_cast<size_t>(parameter)]);
  }
  void delivered() override { coder_.end_step(); }
  void abandoned() override { coder_.take_back_all(); }
  SentCodes sent() const override { return coder_.sent(); }
  bool launch_waits() const override { return inner_.launch_waits(); }
  void announce_failure(const std::string& text) noexcept override {
    inner_.announce_failure(text);
    coder_.announce_failure(text);
  }

  GradientCoder& coder() { return coder_; }

 private:
  bool is_planned(const Bucket& bucket) const;

  CollectiveTransport inner_;
  GradientCoder coder_;
  std::vector<CodedShard> shards_;
  int64_t sharers_;
  // the step that runs
  Buckets* buckets_ = nullptr;
  const std::vector<ParameterInfo>* infos_ = nullptr;
  const std::vector<at::Tensor>* tensors_ = nullptr;
  double scale_ = 1;
  std::vector<bool> arrived_;  // by parameter
};

}  // namespace trireme
