#pragma once

// Gradient path 2/5. In: grad_hook.h  Out: compressor.h

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/shard_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace trireme {

class BufferPool;

// [Note: who owns a gradient's memory]
//
// A bucket owns one flat buffer. What happens to a parameter's .grad depends on what it was when
// this backward began:
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
// Where each rank keeps its shards only (OwnShards), the buffer is lazy (memory/flat_buffer.h):
// what others own are zeros that take no memory, and .grad has its full shape nevertheless. A .grad
// that was reduced before is set aside by the reducer and added to what comes.
//
// Where ranks reduce_scatter what each of them keeps (OwnShards::scatters), the buffer holds one
// run per rank, of what that rank owns of each gradient, padded to the longest: nothing else is
// moved than what goes over the wire. It is taken when the first gradient comes and given up when
// the sums are there. These are what .grad of an owner becomes; without owners they are copied into
// a lazy buffer, over which .grad has its full shape as above.
//
// A buffer is used again for the next step only if nobody holds a range of it: a gradient that the
// user kept from an earlier step is never overwritten. Such a bucket simply takes a new buffer.

// Says which part of each gradient this rank keeps: all of it without a plan.
struct OwnShards {
  std::shared_ptr<const ShardPlan> plan;
  int64_t rank = 0;
  bool scatters = false;
  std::shared_ptr<BufferPool> pool = nullptr;  // where buffers come from; needs scatters

  explicit operator bool() const { return plan != nullptr; }
  ShardRange of(const BucketSlot& slot) const {
    return plan ? plan->of(slot.parameter, rank) : ShardRange{0, slot.numel};
  }
};

// How one parameter's gradient stands in the step that runs.
enum class GradOrigin : uint8_t { kFresh, kInPlace, kForeign };

// The memory of one planned bucket. Not thread-safe; its reducer serialises access.
class TRIREME_API Bucket {
 public:
  // `parameters` is the list that the plan's indices point into; it must outlive the bucket.
  // `tail_numel` elements follow the gradients in the buffer and are the reducer's. Parameters must
  // be dense in memory if `own` has a plan.
  Bucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters, int64_t tail_numel,
         OwnShards own = {});

  // Starts a step: decides each slot's origin and finds a buffer. A `shadow` step contributes zeros
  // and never touches a .grad (join).
  void begin_step(bool shadow);

  // Makes the slot hold zeros in this step, whatever .grad its parameter has: the parameter is no
  // longer what the slot was planned for.
  void leave_empty(size_t slot) { slots_[slot].empty = true; }

  // Hears that the gradient of `slot` was accumulated (perhaps not for the first time in this
  // step).
  void gradient_arrived(size_t slot, double scale);

  // Notes that the gradient of `slot` was accumulated, where take() will ask for it.
  void note_arrived(size_t slot) { slots_[slot].arrived = true; }
  // Returns what this rank has for a slot, as it lies in the buffer; undefined for zeros. Moves a
  // fresh gradient that arrived out of .grad. Used instead of complete().
  at::Tensor take(size_t slot);

  // Brings everything that is not yet in the buffer into it, times `scale`: gradients that did not
  // arrive contribute what .grad holds, or zeros. Afterwards payload() is ready to be reduced.
  void complete(double scale);

  // Takes the result of a communication hook, if that is not the buffer itself.
  void take_result(const at::Tensor& result);

  // Puts the reduced gradient of a slot into the .grad of its parameter.
  void deliver(size_t slot, bool as_bucket_view);
  // Puts what this rank owns of the sum, plus what it owns of `earlier` (may be undefined), which
  // keeps its identity, into the parameter's .grad. Does so in a shadow step, too. Needs shards.
  void deliver_shard(size_t slot, const at::Tensor& earlier);
  // Makes what this rank owns of the sum, times `scale`, the .grad of `owner`, which is shaped like
  // its shard, or adds it to that .grad. Needs shards.
  void deliver_to(size_t slot, const at::Tensor& owner, double scale);
  // Gives up what others own, after a collective has brought all of the sum or, with scatters, what
  // this rank owns of it. Needs shards.
  void keep_own();
  // Makes what others own of .grad zeros without memory again, if anybody wrote to it.
  void keep_own_gradients();
  // Returns where a reduce_scatter of wire() puts what this rank owns of the sum. Needs scatters.
  const at::Tensor& sums();
  // Returns the parts of sums() that belong to the `chosen` slots; neighbours are one tensor.
  std::vector<at::Tensor> sums_of(const std::vector<bool>& chosen);
  // Returns what this rank owns of the sum, in one row that may be written to. Needs shards, and
  // the sum to be there.
  at::Tensor own_sum(size_t slot) const;
  ShardRange own(size_t slot) const { return own_.of(plan_.slots[slot]); }
  // Returns what this rank gets of wire(), in elements: ascending, apart from each other, the tail
  // included.
  std::vector<ShardRange> own_ranges() const;
  // Makes the .grad of a parameter that no rank used what it was when the step began.
  void restore(size_t slot);

  // Moves a .grad that is a range of `earlier` into the range of this bucket, with its values and
  // its identity.
  void adopt_range(size_t slot, const Bucket& earlier);
  bool holds_gradient_of(const at::Tensor& parameter) const;

  const PlannedBucket& plan() const { return plan_; }
  // Returns the gradients without the tail; the sparse gradient of a sparse bucket.
  at::Tensor payload() const;
  // Returns gradients and tail together: what goes over the wire.
  const at::Tensor& wire() const { return buffer_; }
  at::Tensor tail() const;
  const std::vector<int64_t>& slot_sizes(size_t slot) const { return slots_[slot].sizes; }

 private:
  struct Slot {
    int64_t offset = 0;  // counts in the run of each rank where ranks scatter
    int64_t numel = 0;
    int64_t run_numel = 0;  // room in the run of each rank, padding included; needs scatters
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    GradOrigin origin = GradOrigin::kFresh;
    bool packed = false;   // its range of the buffer holds this step's contribution
    bool arrived = false;  // a hook fired for it in this step
    bool empty = false;    // see leave_empty()
    at::Tensor saved;      // in place, but not used here: what to restore if nobody used it
  };

  const at::Tensor& parameter(size_t slot) const;
  // Returns what this rank has for a slot; undefined for zeros.
  at::Tensor contribution(size_t slot) const;
  bool is_range(const at::Tensor& grad, const Slot& slot) const;
  // Returns the memory of the gradients that deliver() and deliver_shard() leave.
  const at::Tensor& home() const { return own_.scatters ? whole_ : buffer_; }
  at::Tensor range(size_t slot) const;
  at::Tensor own_part(const at::Tensor& grad, size_t slot) const;
  void allocate();
  void have_home();
  // Returns the gradient, or a copy, that lies in memory as its range of the buffer does. Throws
  // c10::Error where it has other sizes than were planned.
  static at::Tensor arranged(const at::Tensor& grad, const Slot& slot);
  void write(size_t slot, const at::Tensor& grad, double scale, bool add);
  struct Write {
    double scale = 1;
    bool add = false;
  };
  // Writes elements of a dense tensor to `offset` in the buffer.
  void write_range(int64_t offset, const at::Tensor& from, ShardRange range, Write how);
  void plan_runs();
  void allocate_runs();
  ShardRange part_of(size_t slot, int64_t rank) const;
  void write_runs(size_t slot, const at::Tensor& grad, double scale, bool add);
  void complete_runs(double scale);
  std::vector<at::Tensor> runs_on_device();
  void complete_sparse(double scale);
  void complete_on_device(double scale);

  PlannedBucket plan_;
  const std::vector<at::Tensor>& parameters_;
  int64_t tail_numel_;
  OwnShards own_;
  bool shadow_ = false;
  bool grads_may_alias_ = false;  // buffer and parameters have one dtype
  std::vector<Slot> slots_;
  at::Tensor buffer_;
  // what only ranks that scatter have
  int64_t run_numel_ = 0;
  at::Tensor sums_;
  at::Tensor whole_;  // without owners: the gradients, lazy
};

}  // namespace trireme
