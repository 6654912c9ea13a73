#pragma once

// Gradient path 3/5. In: bucket.h  Out: grad_delivery.h (through grad_reducer.h)

#include <trireme/comm/communicator.h>
#include <trireme/grad/bucket.h>
#include <trireme/grad/used_map.h>
#include <trireme/kernels/span.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

using Buckets = std::vector<std::unique_ptr<Bucket>>;

// One synchronized step as a transport sees it. All members live until the next step begins;
// buckets have begun theirs.
struct TransportStep {
  Buckets& buckets;
  const std::vector<std::string>& labels;
  const std::vector<ParameterInfo>* parameters = nullptr;  // names, for messages; may be null
  const std::vector<at::Tensor>* tensors = nullptr;        // those parameters; may be null
  double scale = 1;                                        // gradients are multiplied by it
  const UsedMap* map;        // rides behind the last bucket's gradients; null if it goes alone
  bool shadow = false;       // this rank contributes zeros
  bool defers_sums = false;  // leaves the sums to visit_sums(), if the transport can
};

// A bucket to be reduced.
struct TransportBucket {
  Bucket& bucket;
  size_t index = 0;
  int64_t number = 0;    // the index under which a communication hook knows it
  bool is_last = false;  // last of the step; false for extra buckets
  const std::string& label;
  double scale = 1;           // its gradients are multiplied by it
  Pending* before = nullptr;  // the bucket that was launched before it; null if there is none
};

// A piece of this rank's part of the sums.
struct SumPiece {
  int64_t parameter = 0;
  int64_t begin = 0;  // in reals of this rank's shard
  Span values{};      // may be written to
};
using SumVisitor = std::function<void(const SumPiece&)>;

// What a transport does, always. The reducer reads it, and asks nothing of this in a step.
struct TransportTraits {
  // Results are averages already; else the reducer divides, by TransportStep::scale.
  bool divides = false;
  // Each bucket goes on under one index, so that a plan keeps its buckets once it has learned them.
  bool keeps_buckets = false;
  // The used-map may ride behind the last bucket's gradients.
  bool carries_map = true;
  // A used-map that goes alone goes when all buckets are back: the transport may issue collectives
  // of its own until then.
  bool map_goes_last = false;
  // Gradients go one by one, not bucket by bucket.
  bool streams = false;
  // A stream may take its place where ranks share memory.
  bool may_become_stream = false;
  // Buckets may hold runs to be reduce_scattered (run_bucket.h); if not, all are flat.
  bool takes_runs = true;
};

// The codes of a step that this rank has sent.
struct SentCodes {
  int64_t bytes = 0;     // to other senders; an all-reduce counts once
  double encode_ms = 0;  // to make them
};

// How gradients leave this rank, and come back as sums over the ranks. A gradient that is not
// summed yet leaves in no other way, but for the replicas of a pipeline, which sum whole gradients
// by the second stage alone (outer_all_reduce.h). A transport for the buckets of each step is
// called in this order: begin(), accumulated() and ready() as gradients come, launch() once per
// bucket in the order of the plan, close() when backward is over. Another transport (compressed,
// pushed to a server, recorded) can take its place, and no stage before or after this one knows the
// difference.
//
// Not thread-safe; its reducer serialises access.
class TRIREME_API Transport {
 public:
  // `ranks` are all that take part in the step.
  explicit Transport(std::shared_ptr<Communicator> ranks, const TransportTraits& traits = {})
      : ranks_(std::move(ranks)), traits_(traits) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const TransportTraits& traits() const { return traits_; }

  virtual void begin(const TransportStep& step) = 0;
  // Called when a gradient of a slot is in .grad; the transport may move it out. May repeat in a
  // step.
  virtual void accumulated(size_t bucket, size_t slot) = 0;
  // Called when the gradient of a slot is complete, on transports that stream.
  virtual void ready(size_t /*bucket*/, size_t /*slot*/) {}
  // Returns whether a slot's gradient is on its way, so that no more can be added.
  virtual bool has_taken(size_t /*bucket*/, size_t /*slot*/) const { return false; }
  // Returns whether so many gradients find no room that this rank should wait for peers, in
  // catch_up().
  virtual bool is_behind() const { return false; }
  virtual void catch_up() {}
  // Starts to reduce a bucket, of this step or beside it. Fills in gradients that did not arrive.
  virtual Pending launch(const TransportBucket& request) = 0;
  // Called when backward is over: gradients that are not ready are due now.
  virtual void close() {}
  // Starts to sum up the result of launch() over the ranks that hold the same shards: the sums of
  // the flagged slots. Nothing is in flight if no other rank holds them, or none is flagged.
  virtual Pending reduce_outer(Bucket& /*bucket*/, const std::vector<bool>& /*slots*/,
                               const std::string& /*label*/) {
    return {};
  }
  // Starts to sum up the used-map if it goes alone.
  virtual Pending reduce_map(const at::Tensor& counts) {
    return ranks_->all_reduce({counts}, ReduceOp::kSum, "used-map");
  }

  // Called when the map has shown that no rank used a parameter: what came back for it goes
  // nowhere.
  virtual void unused(int64_t /*parameter*/) {}
  // Called when the step is over: after all sums were delivered, or after an exception, which may
  // have come before begin().
  virtual void delivered() {}
  virtual void abandoned() {}
  // Returns what has left in this step, or the one before, as codes.
  virtual SentCodes sent() const { return {}; }

  // Returns whether a launch may wait for other ranks, and so must wait for the end of backward.
  virtual bool launch_waits() const { return false; }

  // Returns whether this step leaves its sums to visit_sums() or stop_deferring().
  virtual bool defers_sums() const { return false; }
  // Calls `visit` with the sums of this rank's part, piece by piece. May wait for other ranks.
  virtual void visit_sums(const SumVisitor& /*visit*/) {}
  // Sums a step that defers up into the buckets after all.
  virtual void stop_deferring() {}

  // Tells `text` to all ranks that may wait for this one.
  virtual void announce_failure(const std::string& text) noexcept { announce(*ranks_, text); }

 protected:
  static void announce(Communicator& ranks, const std::string& text) noexcept {
    if (ranks.world() > 1 && !ranks.failure()) ranks.announce_failure(text);
  }

  std::shared_ptr<Communicator> ranks_;

 private:
  const TransportTraits traits_;
};

}  // namespace trireme
