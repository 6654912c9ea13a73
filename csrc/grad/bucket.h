#pragma once

// Gradient path 2/5. In: grad_hook.h  Out: transport.h

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/shard_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// [Note: who owns a gradient's memory]
//
// A bucket owns one flat buffer. A parameter's .grad is handled by its state when this backward
// began:
//
//   fresh     it was None. On CPU the gradient is copied into the buffer as soon as it is
//             accumulated and its own memory is freed, so that the allocator hands the same warm
//             pages to the next layer. After the reduction .grad becomes a tensor over its range of
//             the buffer: nothing is copied out. It is no view for autograd (detach_() and friends
//             work) but it shares storage with its neighbours.
//   in place  it already was such a range (set_to_none=False, accumulation). Nothing is copied at
//             all.
//   foreign   it was any other tensor. It is copied in when the bucket is launched and out when the
//             bucket is done, and keeps its identity; with gradient_as_bucket_view it is replaced
//             by a range instead.
//
// There are three kinds of bucket:
//
//   FlatBucket    is as above. Where each rank keeps its shards only, its buffer is lazy
//                 (memory/flat_buffer.h): what others own are zeros that take no memory, and .grad
//                 has its full shape nevertheless. A .grad that was reduced before is set aside
//                 (strategies/zero/shard_delivery.h) and added to what comes.
//   RunBucket     is reduce_scattered. Its buffer holds one run per rank, of what that rank owns of
//                 each gradient, padded to the longest: nothing else is moved than what goes over
//                 the transport. It is taken when the first gradient comes and given up when the
//                 sums are there. These become the .grad of owners, or are copied into a lazy
//                 buffer over which .grad has its full shape.
//   SparseBucket  holds one sparse gradient.
//
// A buffer is used again for the next step only if nobody holds a range of it: a gradient that the
// user kept from an earlier step is never overwritten. Such a bucket simply takes a new buffer.
//
// When fewer gradients are planned, as layers are frozen, the buckets that end earlier than before
// take the memory of those before them, whose pages are there: to touch new ones costs as much as
// the reduction.
//
// A FlatBucket also keeps the tensors that it has made for ranges, and their Python objects with
// them: each becomes .grad again as long as nobody holds or has changed it. So a step makes no
// tensors, and zero_grad() frees none.

// The part of each gradient that this rank keeps: all of it without a plan.
struct OwnShards {
  std::shared_ptr<const ShardPlan> plan;
  int64_t rank = 0;

  explicit operator bool() const { return plan != nullptr; }
  ShardRange of(const BucketSlot& slot) const {
    return plan ? plan->of(slot.parameter, rank) : ShardRange{0, slot.numel};
  }
};

// The state of one parameter's gradient in the step that runs.
enum class GradOrigin : uint8_t { kFresh, kInPlace, kForeign };

// The memory of one planned bucket. Not thread-safe; its reducer serialises access.
class TRIREME_API Bucket {
 public:
  virtual ~Bucket() = default;
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  // Starts a step: decides each slot's origin and finds a buffer. A `shadow` step contributes zeros
  // and never touches a .grad (join).
  virtual void begin_step(bool shadow);

  // Makes the slot hold zeros in this step, whatever .grad its parameter has: the parameter is no
  // longer the one that the slot was planned for. A .grad that lies in the buffer moves out of it.
  void leave_empty(size_t slot);

  // Called when the gradient of `slot` was accumulated (perhaps not for the first time in this
  // step). Divides it by writing it times `scale`, if that can be done at once.
  virtual void gradient_arrived(size_t slot, double scale);

  // Notes that the gradient of `slot` was accumulated, if take() will ask for it.
  void note_arrived(size_t slot) { slots_[slot].arrived = true; }
  // Returns this rank's values for a slot, as they lie in the buffer; undefined for zeros. Moves a
  // fresh gradient that arrived out of .grad. Used instead of complete().
  at::Tensor take(size_t slot);

  // Brings all gradients that are not yet in the buffer into it, times `scale`: gradients that did
  // not arrive contribute the values of .grad, or zeros. Afterwards transport() is ready to be
  // reduced.
  virtual void complete(double scale) = 0;

  // Starts to sum transport() up over the ranks of `ranks`: the one collective of this bucket.
  virtual Pending reduce(Communicator& ranks, const std::string& label) = 0;

  // Takes the result of a communication hook, if that is not the buffer itself.
  virtual void take_result(const at::Tensor& result);

  // Puts the reduced gradient of a slot into the .grad of its parameter. Needs all of the sum.
  virtual void deliver(size_t slot, bool as_bucket_view);
  // Restores the .grad that a parameter which no rank used had when the step began.
  void restore(size_t slot);

  // Frees other ranks' parts, once a collective has brought the whole sum, or this rank's part.
  virtual void keep_own() {
    if (own_) keep_own_gradients();
  }
  // Makes the parts of other ranks in .grad zeros without memory again, if they were written to.
  void keep_own_gradients();
  // Returns a tensor of the parameter's shape with this rank's part of the sum. Needs shards.
  virtual at::Tensor spread_sum(size_t slot);
  // Returns this rank's part of the sum, laid out as told; it may be written to. Needs shards, and
  // the sum to be there.
  virtual at::Tensor own_sum(size_t slot, at::IntArrayRef sizes, at::IntArrayRef strides) const;
  at::Tensor own_sum(size_t slot) const { return own_sum(slot, {own(slot).numel}, {1}); }
  // Returns this rank's parts of all sums, one behind the other: own_sum() lies in it. Needs a
  // bucket that is reduce_scattered.
  virtual at::Tensor own_sums();
  // Returns the parts of the sums that belong to the `chosen` slots; neighbours are one tensor.
  // Needs a bucket that is reduce_scattered.
  virtual std::vector<at::Tensor> sums_of(const std::vector<bool>& chosen);
  ShardRange own(size_t slot) const { return own_.of(plan_.slots[slot]); }
  // Returns this rank's part of a tensor that lies in memory as a slot's gradient does.
  at::Tensor own_part(const at::Tensor& grad, size_t slot) const;
  // Returns the ranges of a flat transport() that this rank gets, in elements: ascending, apart
  // from each other, the tail included.
  std::vector<ShardRange> own_ranges() const;

  // Moves a .grad that is a range of `earlier` into the range of this bucket, with its values and
  // its identity.
  void adopt_range(size_t slot, const Bucket& earlier);
  virtual bool holds_gradient_of(const at::Tensor& parameter) const;
  // Takes the memory of `earlier`, where gradients lie as here up to the end of this bucket, and
  // where nobody else holds any of it. Returns whether it did; the earlier bucket is spent then.
  virtual bool take_memory(Bucket& /*earlier*/) { return false; }

  const PlannedBucket& plan() const { return plan_; }
  // Returns whether its gradients become .grad in the dtypes of `infos`.
  bool delivers_as(const std::vector<ParameterInfo>& infos) const;
  // Returns gradients and tail together, the data that go over the wire.
  const at::Tensor& transport() const { return buffer_; }
  // Returns the gradients without the tail; the sparse gradient of a sparse bucket.
  virtual at::Tensor payload() const { return buffer_; }
  bool has_tail() const { return tail_numel_ > 0; }
  at::Tensor tail() const { return buffer_.narrow(0, plan_.numel, tail_numel_); }
  const std::vector<int64_t>& slot_sizes(size_t slot) const { return slots_[slot].sizes; }

 protected:
  struct Slot {
    std::string name;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    at::ScalarType dtype = at::kFloat;  // dtype of .grad
    GradOrigin origin = GradOrigin::kFresh;
    bool packed = false;   // its range of the buffer holds this step's contribution
    bool arrived = false;  // a hook fired for it in this step
    bool empty = false;    // see leave_empty()
    at::Tensor saved;      // in place, but not used here: restored if no rank used it
  };
  struct Write {
    double scale = 1;
    bool add = false;
  };

  // Makes a bucket. The plan's indices point into `parameters` and `infos`; the first must outlive
  // the bucket. How gradients lie is as in `infos`, about which ranks agree, whatever the tensors
  // are by now. `tail_numel` elements follow the gradients in the buffer and are the reducer's.
  // Parameters must be dense in memory if `own` has a plan.
  Bucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
         const std::vector<ParameterInfo>& infos, int64_t tail_numel, OwnShards own);

  const at::Tensor& parameter(size_t slot) const;
  // Returns this rank's gradient of a slot; undefined for zeros.
  at::Tensor contribution(size_t slot) const;
  // Throws c10::Error if a gradient has another dtype than .grad and the transport were planned
  // with: it would be rounded unseen.
  void check_dtype(const at::Tensor& grad, const Slot& slot) const;
  // Returns the gradient, or a copy, that lies in memory as its range of the buffer does. Throws
  // c10::Error if it has other sizes than were planned, and as check_dtype() does.
  at::Tensor arranged(const at::Tensor& grad, const Slot& slot) const;
  // Writes elements of a dense tensor to `offset` in the buffer.
  void write_range(int64_t offset, const at::Tensor& from, ShardRange range, Write how);
  at::Tensor range(size_t slot) const;
  // Drops the .grad of the slots whose gradients are in the buffer now.
  void drop_taken();

  virtual bool is_range(const at::Tensor& /*grad*/, size_t /*slot*/) const { return false; }
  // Returns the memory of the gradients that are left in .grad.
  virtual const at::Tensor& home() const { return buffer_; }
  virtual void have_home() {}
  virtual void write(size_t /*slot*/, const at::Tensor& /*grad*/, Write /*how*/) {}

  PlannedBucket plan_;
  const std::vector<at::Tensor>& parameters_;
  int64_t tail_numel_;
  OwnShards own_;
  bool shadow_ = false;
  bool grads_may_alias_ = false;  // buffer and gradients have one dtype
  std::vector<Slot> slots_;
  at::Tensor buffer_;
};

}  // namespace trireme
