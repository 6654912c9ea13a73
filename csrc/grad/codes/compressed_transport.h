#pragma once

#include <trireme/grad/codes/bucket_journey.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/residuals.h>
#include <trireme/grad/codes/senders.h>
#include <trireme/grad/transport.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// What a rank keeps of one parameter's codes, and of which part of it.
struct KeptPart {
  std::string name;
  int64_t numel = 0;   // of all of the parameter, in real numbers
  int64_t sender = 0;  // the sender that this rank codes for, or with
  int64_t begin = 0;   // the place of its first element
  KeptOfCode* kept;    // owned by the transport
};

// A transport that sends codes of gradients; see [Note: gradient compression] in compression.h. A
// bucket is coded when it is complete, on the thread that runs backward or, where a host's ranks
// send together, on the one that waits; it is decoded when it is waited for.
//
// Gradients that do not lie on the CPU, or are no fp32, are copied there and back.
class TRIREME_API CompressedTransport final : public Transport {
 public:
  // `ranks` are all that take part in a step, and several senders among them. Throws ValueError for
  // bad arguments.
  CompressedTransport(std::shared_ptr<Communicator> ranks, const Compression& compression);

  // Finds the senders, the first time. Throws ValueError if gradients are sparse.
  void begin(const TransportStep& step) override;
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const TransportBucket& request) override;
  void unused(int64_t parameter) override;
  SentCodes sent() const override { return sent_; }
  void announce_failure(const std::string& text) noexcept override;

  const Compression& compression() const { return compression_; }
  // Returns the steps so far, and has them counted from `steps` on.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }
  // Returns the number of senders. Collective the first time.
  int64_t senders();
  // Returns what is kept of the parameters of a layout; what is not kept yet is left out, or begun
  // if `makes`. Senders must be known.
  std::vector<KeptPart> kept_parts(const std::vector<ParameterInfo>& parameters,
                                   const std::vector<at::Tensor>& tensors, bool makes);
  // Begins anew with zeros.
  void forget();

 private:
  // The elements of a gradient that a leg codes.
  struct Part {
    int64_t begin = 0;
    int64_t numel = 0;
  };

  MatrixShape shape_of(const BucketSlot& slot) const;
  bool is_sent_dense(const BucketSlot& slot) const;
  Part part_of(const BucketSlot& slot, int64_t numel, int64_t leg) const;
  CodedGradient coded(const BucketSlot& slot, const at::Tensor& values, Part part);
  CodesInFlight exchange(CodeExchange exchange);
  bool is_of_step(const TransportBucket& request) const;
  const at::Tensor& parameter(const BucketSlot& slot) const {
    return (*step_.tensors)[static_cast<size_t>(slot.parameter)];
  }
  const std::string& name_of(const BucketSlot& slot) const {
    return (*step_.parameters)[static_cast<size_t>(slot.parameter)].name;
  }
  [[noreturn]] void refuse_sparse(const std::string& name) const;

  std::optional<Senders> senders_;  // of the first step on: a rank alone may copy a module
  Compression compression_;
  Residuals residuals_;
  struct Step {
    Buckets* buckets = nullptr;
    const std::vector<ParameterInfo>* parameters = nullptr;
    const std::vector<at::Tensor>* tensors = nullptr;
    std::vector<bool> arrived = {};  // by parameter
    std::shared_ptr<BucketJourneys> journeys = nullptr;
  } step_;
  int64_t steps_ = 0;
  SentCodes sent_;
};

}  // namespace trireme
