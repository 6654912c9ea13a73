#pragma once

#include <trireme/grad/codes/bucket_journey.h>
#include <trireme/grad/codes/code_memory.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/residuals.h>
#include <trireme/grad/codes/senders.h>
#include <trireme/grad/transport.h>
#include <trireme/memory/bucket_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// A parameter whose gradient is to be coded.
struct CodedParameter {
  const at::Tensor& tensor;
  const std::string& name;
  at::IntArrayRef sizes;
  int64_t numel = 0;
  int64_t number = 0;   // its place among all of them, the same on all ranks
  int64_t offset = 0;   // of its gradient in the bucket
  bool arrived = true;  // this rank has a gradient of it
  // The sizes that say whether it goes as fp32; its own if there are none. Those of the largest
  // shard, so that all shards of a parameter go alike.
  at::IntArrayRef largest = {};
};

// A bucket to be coded, with this rank's gradients, which become the average. What lies between
// the gradients stays as it is.
struct CodedBucket {
  at::Tensor payload;  // flat, dense
  std::vector<CodedParameter> parameters = {};
  double scale = 1;  // of the sum over all ranks
  const std::string& label;
  double input_scale = 1;  // of this rank's gradients before they are coded
};

// What a rank keeps of one parameter's codes, and of which part of it.
struct KeptPart {
  std::string name;
  int64_t numel = 0;   // of all of the parameter, in real numbers
  int64_t sender = 0;  // the sender that this rank codes for, or with
  int64_t begin = 0;   // the place of its first element
  KeptOfCode* kept;    // owned by the coder
  int64_t number = 0;  // the parameter's place among all of them
  int64_t coded = 0;   // elements of this part
};

// What codes gradients on their way between senders, step by step; see [Note: gradient compression]
// in compression.h. Gradients that do not lie on the CPU, or are no fp32, are copied there and
// back. Not thread-safe.
class TRIREME_API GradientCoder {
 public:
  // `ranks` are all that take part in a step, and several senders among them. Throws ValueError for
  // bad arguments.
  GradientCoder(std::shared_ptr<Communicator> ranks, const Compression& compression);

  // Begins a step. Collective the first time, when senders meet: a rank alone may copy a module.
  void begin_step();
  // Codes a bucket and starts to exchange the codes. Ranks code the same buckets in one order.
  Pending code(const CodedBucket& bucket);
  // Takes back what this step has sent of a parameter that had not arrived.
  void take_back(const at::Tensor& parameter) { residuals_.take_back(parameter); }
  // Ends a step, unless it is abandoned.
  void end_step() { is_in_step_ = false; }
  // Takes back what the step has sent that has begun and not ended; where ranks share the memory of
  // one host, since no other group works again after a failure.
  void take_back_all();
  // Returns what has left in this step, or the one before.
  const SentCodes& sent() const { return sent_; }
  void announce_failure(const std::string& text) const noexcept;

  const Compression& compression() const { return compression_; }
  // Returns the steps so far, and has them counted from `steps` on.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }
  // Returns the number of senders. Collective the first time.
  int64_t senders();
  // Returns what is kept of these parameters, in their order; what is not kept yet is left out, or
  // begun if `makes`. Nothing before the senders have met.
  std::vector<KeptPart> kept_parts(const std::vector<ParameterInfo>& infos,
                                   const std::vector<at::Tensor>& tensors, bool makes);
  std::vector<KeptPart> kept_parts(const std::vector<CodedParameter>& parameters, bool makes);
  // Begins anew with zeros.
  void forget();

 private:
  // The elements of a gradient that a leg codes.
  struct Part {
    int64_t begin = 0;
    int64_t numel = 0;
  };

  bool is_always_dense(const CodedParameter& parameter) const;
  bool is_sent_dense(const CodedParameter& parameter) const;
  Part part_of(const CodedParameter& parameter, int64_t numel, int64_t leg) const;
  CodedGradient coded(const CodedParameter& parameter, const at::Tensor& values, Part part);
  CodesInFlight exchange(CodeExchange exchange);

  std::shared_ptr<Communicator> ranks_;
  std::optional<Senders> senders_;
  bool may_go_on_ = false;  // after a backward that was abandoned
  Compression compression_;
  Residuals residuals_;
  CodeMemory memory_;
  std::shared_ptr<BucketJourneys> journeys_;  // of this step
  int64_t steps_ = 0;
  bool is_in_step_ = false;
  SentCodes sent_;
};

}  // namespace trireme
