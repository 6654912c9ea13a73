#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/deposit_stream.h>
#include <trireme/grad/transport.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: buckets as a stream]
//
// If ranks share memory and keep all its CPUs busy, buckets do not go out one by one. All of them,
// in plan order, are one round of a DepositStream. A gradient is written into this rank's ring when
// its turn has come (once, while it is still in cache) and freed; whenever that happens, this rank
// also sums up the gradients that all ranks have deposited meanwhile, straight into the buckets'
// buffers. A gradient that finds the ring full waits until the next one comes, or backward ends;
// only a rank so far ahead of a peer that it holds kMostBacklogBytes of gradients waits itself.
//
// The end of the round holds the used-map, which is deposited when backward ends: so no rank
// completes a round that another one has abandoned.
class TRIREME_API StreamTransport final : public Transport {
 public:
  static constexpr int64_t kMostBacklogBytes = int64_t{64} << 20;

  // Makes a stream, or null on all ranks if deposits are not available. Collective. Extra memory: a
  // ring per rank. Ranks that keep whole gradients also get none if they are more than four (each
  // reads the gradients of all, which by then costs more than it saves) or leave CPUs free.
  struct Options {
    bool sharded = false;
    int64_t bytes = int64_t{8} << 20;  // bytes of the ring, at least
  };
  static std::unique_ptr<StreamTransport> make(const std::shared_ptr<Communicator>& ranks,
                                               const Options& options);
  // Returns the ring bytes for all gradients of these parameters, however they are ordered.
  static int64_t bytes_for(const std::vector<ParameterInfo>& parameters);

  StreamTransport(std::shared_ptr<Communicator> ranks, std::unique_ptr<DepositStream> stream,
                  int64_t ring_bytes)
      : Transport(std::move(ranks), {.streams = true}),
        stream_(std::move(stream)),
        ring_bytes_(ring_bytes) {}

  // Returns whether these buckets can go this way: dense, on CPU.
  static bool takes(const BucketPlan& plan);

  // Begins a step, which defers its sums if the ring has room for all of it.
  void begin(const TransportStep& step) override;
  void accumulated(size_t bucket, size_t slot) override { bucket_at(bucket).note_arrived(slot); }
  // Deposits and collects as much as possible without waiting.
  void ready(size_t bucket, size_t slot) override;
  bool has_taken(size_t bucket, size_t slot) const override;
  // Returns whether more gradients than kMostBacklogBytes find no room.
  bool is_behind() const override;
  void catch_up() override;
  // Returns the bucket as a collective in flight. It is done when it is deposited, in a step that
  // defers.
  Pending launch(const TransportBucket& request) override;
  void close() override;

  bool defers_sums() const override { return defers_; }
  // Visits in the order of the stream, once a step that defers is deposited.
  void visit_sums(const SumVisitor& visit) override;
  void stop_deferring() override;

 private:
  class Arrival;
  struct Part {  // one part of the stream: a bucket with its tail
    int64_t begin = 0;
    int64_t bytes = 0;
    int64_t padded = 0;
    std::vector<ShardRange> own;  // in bytes
    std::vector<bool> ready;      // one flag per slot
  };

  Bucket& bucket_at(size_t bucket) const { return *(*buckets_)[bucket]; }
  void advance();
  bool deposit_some();
  bool deposit_slot();
  bool deposit(size_t bytes);
  bool collect_some();
  bool is_done(size_t bucket) const { return defers_ ? bucket_ > bucket : collecting_ > bucket; }
  void pass_over(int64_t end);
  int64_t slot_bytes(size_t bucket, size_t slot) const;
  int64_t tail_bytes() const { return tail_.defined() ? static_cast<int64_t>(tail_.nbytes()) : 0; }
  void wait_for(size_t bucket);

  std::unique_ptr<DepositStream> stream_;
  int64_t ring_bytes_;
  bool defers_ = false;
  Buckets* buckets_ = nullptr;
  const std::vector<std::string>* labels_ = nullptr;
  const std::vector<ParameterInfo>* parameters_ = nullptr;
  double scale_ = 1;
  const UsedMap* map_ = nullptr;
  bool shadow_ = false;
  std::vector<Part> parts_;
  bool closed_ = false;
  at::Tensor tail_;

  int64_t backlog_bytes_ = 0;  // ready and not deposited
  // position of deposits
  size_t bucket_ = 0;
  size_t slot_ = 0;
  int64_t element_ = 0;  // place in the slot, in reals
  bool has_source_ = false;
  at::Tensor source_;  // the slot's gradient; undefined: zeros
  // position of collects
  size_t collecting_ = 0;
  size_t own_ = 0;  // index into the part's own ranges
  std::vector<Pending::Clock::time_point> collected_at_;
};

}  // namespace trireme
