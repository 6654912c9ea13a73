#include <trireme/grad/stream_transport.h>

#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/shm/operation.h>

#include <algorithm>

namespace trireme {
namespace {

constexpr int64_t kMostRanks = 4;
// The bytes that are moved in one go, so that sums are still in a cache when their ring is written
// again.
constexpr int64_t kRunBytes = int64_t{256} << 10;
constexpr int64_t kLine = 64;

int64_t round_up(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

std::unique_ptr<StreamTransport> StreamTransport::make(const std::shared_ptr<Communicator>& ranks,
                                                       const Options& options) {
  if (ranks->world() == 1 || (!options.sharded && ranks->world() > kMostRanks)) return nullptr;
  Host* host = ranks->host();
  if (host == nullptr) return nullptr;
  const int64_t bytes = round_up(options.bytes);
  auto stream = host->make_deposit_stream(bytes, /*also_with_free_cpus=*/options.sharded);
  return stream ? std::make_unique<StreamTransport>(ranks, std::move(stream), bytes) : nullptr;
}

int64_t StreamTransport::bytes_for(const std::vector<ParameterInfo>& parameters) {
  int64_t bytes = 0;
  for (const ParameterInfo& info : parameters)
    bytes += round_up(info.numel * static_cast<int64_t>(c10::elementSize(info.gradient_dtype())));
  return bytes;
}

bool StreamTransport::takes(const BucketPlan& plan) {
  return std::all_of(plan.buckets.begin(), plan.buckets.end(), [](const PlannedBucket& bucket) {
    return !bucket.sparse && bucket.device.is_cpu();
  });
}

void StreamTransport::begin(const TransportStep& step) {
  const Buckets& buckets = step.buckets;
  buckets_ = &step.buckets;
  labels_ = &step.labels;
  parameters_ = step.parameters;
  scale_ = step.scale;
  map_ = step.map;
  shadow_ = step.shadow;
  closed_ = false;
  tail_.reset();
  source_.reset();
  has_source_ = false;
  bucket_ = slot_ = collecting_ = own_ = 0;
  element_ = backlog_bytes_ = 0;
  collected_at_.assign(buckets.size(), {});
  parts_.resize(buckets.size());
  int64_t begin = 0;
  uint64_t layout = buckets.size();
  for (size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = *buckets[i];
    const PlannedBucket& plan = bucket.plan();
    const auto element = static_cast<int64_t>(bucket.transport().element_size());
    Part& part = parts_[i];
    part.begin = begin;
    part.bytes = static_cast<int64_t>(bucket.transport().nbytes());
    part.padded = round_up(part.bytes);
    part.own = bucket.own_ranges();
    for (ShardRange& own : part.own) own = {own.begin * element, own.numel * element};
    part.ready.assign(plan.slots.size(), false);
    begin += part.padded;
    layout = shm::mix(layout, static_cast<uint64_t>(plan.dtype));
    for (const BucketSlot& slot : plan.slots)
      layout = shm::mix(shm::mix(layout, static_cast<uint64_t>(slot.parameter)),
                        static_cast<uint64_t>(slot.numel));
  }
  defers_ = step.defers_sums && begin <= ring_bytes_;
  stream_->begin_round({begin, layout, "gradients"});
}

int64_t StreamTransport::slot_bytes(size_t bucket, size_t slot) const {
  const PlannedBucket& plan = bucket_at(bucket).plan();
  return plan.slots[slot].numel * static_cast<int64_t>(c10::elementSize(plan.dtype));
}

void StreamTransport::ready(size_t bucket, size_t slot) {
  parts_[bucket].ready[slot] = true;
  backlog_bytes_ += slot_bytes(bucket, slot);
  advance();
}

bool StreamTransport::has_taken(size_t bucket, size_t slot) const {
  return bucket < bucket_ ||
         (bucket == bucket_ && (slot < slot_ || (slot == slot_ && has_source_)));
}

void StreamTransport::advance() {
  TRIREME_TRACE("stream_transport.advance");
  for (bool moves = true; moves;) {
    moves = deposit_some();
    moves = collect_some() || moves;
  }
}

// Ignores gradients whose turn has not come: they wait for autograd, not for room.
bool StreamTransport::is_behind() const {
  return backlog_bytes_ > kMostBacklogBytes && bucket_ < parts_.size() &&
         slot_ < parts_[bucket_].ready.size() && parts_[bucket_].ready[slot_];
}

void StreamTransport::catch_up() {
  for (; is_behind(); advance()) stream_->wait("gradients of " + (*labels_)[bucket_]);
}

void StreamTransport::close() {
  if (!parts_.empty() && bucket_at(parts_.size() - 1).has_tail())
    map_->write_to(tail_ = at::empty_like(bucket_at(parts_.size() - 1).tail()), shadow_);
  closed_ = true;
  advance();
}

// Deposits the next due piece, if there is room for it.
bool StreamTransport::deposit_some() {
  if (bucket_ == parts_.size()) return false;
  const Part& part = parts_[bucket_];
  const bool is_last = bucket_ + 1 == parts_.size();
  if (slot_ < part.ready.size()) {
    if (!has_source_) {
      if (!part.ready[slot_] && !closed_) return false;
      source_ = bucket_at(bucket_).take(slot_);
      has_source_ = true;
    }
    return deposit_slot();
  }
  if (is_last && !closed_) return false;
  const int64_t tail_begin = part.begin + part.bytes - tail_bytes();
  if (is_last && stream_->deposited() < tail_begin + tail_bytes()) {
    const auto room = stream_->room(tail_begin + tail_bytes() - stream_->deposited());
    const auto* source = static_cast<const std::byte*>(tail_.const_data_ptr());
    std::copy_n(source + (stream_->deposited() - tail_begin), room.size(), room.data());
    return deposit(room.size());
  }
  // Fills the ring up to the next line; the gap belongs to no bucket.
  if (const int64_t gap = part.begin + part.padded - stream_->deposited(); gap > 0) {
    const auto room = stream_->room(gap);
    std::fill(room.begin(), room.end(), std::byte{0});
    if (!deposit(room.size())) return false;
    if (stream_->deposited() < part.begin + part.padded) return true;
  }
  ++bucket_;
  slot_ = 0;
  return true;
}

// Deposits a piece of the gradient whose turn it is.
bool StreamTransport::deposit_slot() {
  const Bucket& bucket = bucket_at(bucket_);
  const Span transport = span_of(bucket.transport());
  const int64_t reals =
      bucket.plan().slots[slot_].numel * (transport.numel / bucket.transport().numel());
  const auto element = static_cast<int64_t>(c10::elementSize(transport.dtype));
  if (element_ < reals) {
    const auto room = stream_->room(std::min((reals - element_) * element, kRunBytes));
    const int64_t piece = static_cast<int64_t>(room.size()) / element;
    if (piece == 0) return false;
    if (source_.defined()) {
      // The memory behind a shorter gradient must not be sent.
      TORCH_CHECK(source_.numel() == bucket.plan().slots[slot_].numel,
                  error_text("grad_reducer",
                             "got a gradient of " + std::to_string(source_.numel()) +
                                 " elements in " + (*labels_)[bucket_] + ", expected " +
                                 std::to_string(bucket.plan().slots[slot_].numel),
                             {}, "Give parameters other data before the forward."));
      scaled_copy({room.data(), transport.dtype, piece},
                  slice(ConstSpan(span_of(source_)), element_, element_ + piece), scale_);
    } else {
      std::fill(room.begin(), room.end(), std::byte{0});
    }
    deposit(room.size());
    element_ += piece;
    if (element_ < reals) return true;
  }
  source_.reset();
  has_source_ = false;
  element_ = 0;
  const auto parameter = static_cast<size_t>(bucket.plan().slots[slot_].parameter);
  if (parameters_ != nullptr) stream_->show((*parameters_)[parameter].name);
  if (parts_[bucket_].ready[slot_]) backlog_bytes_ -= slot_bytes(bucket_, slot_);
  ++slot_;
  return true;
}

bool StreamTransport::deposit(size_t bytes) {
  if (bytes == 0) return false;
  stream_->deposit(static_cast<int64_t>(bytes));
  return true;
}

// Collects the next piece that all have deposited.
bool StreamTransport::collect_some() {
  if (defers_ || collecting_ == parts_.size()) return false;
  const Part& part = parts_[collecting_];
  const int64_t place = stream_->collected() - part.begin;
  while (own_ < part.own.size() && part.own[own_].begin + part.own[own_].numel <= place) ++own_;
  const bool has_more = own_ < part.own.size();
  if (has_more && part.own[own_].begin <= place) {
    const Span transport = span_of(bucket_at(collecting_).transport());
    const int64_t left = part.own[own_].begin + part.own[own_].numel - place;
    auto* sums = static_cast<std::byte*>(transport.data) + place;
    if (stream_->collect(sums, transport.dtype, std::min(left, kRunBytes)) == 0) return false;
  } else if (const int64_t others = (has_more ? part.own[own_].begin : part.padded) - place;
             others > 0) {
    if (stream_->collect(nullptr, at::kByte, others) == 0) return false;
  }
  if (stream_->collected() == part.begin + part.padded) {
    collected_at_[collecting_++] = Pending::Clock::now();
    own_ = 0;
  }
  return true;
}

void StreamTransport::wait_for(size_t bucket) {
  for (advance(); !is_done(bucket); advance())
    stream_->wait("all_reduce of " + (*labels_)[collecting_]);
}

void StreamTransport::pass_over(int64_t end) {
  while (stream_->collected() < end) {
    if (stream_->collect(nullptr, at::kByte, end - stream_->collected()) == 0)
      stream_->wait("reduce_scatter of " + (*labels_)[collecting_]);
  }
}

void StreamTransport::visit_sums(const SumVisitor& visit) {
  for (; collecting_ < parts_.size(); ++collecting_) {
    const Bucket& bucket = bucket_at(collecting_);
    const Part& part = parts_[collecting_];
    const at::ScalarType real = c10::toRealValueType(bucket.plan().dtype);
    const auto bytes_of = [&](int64_t numel) {
      return numel * static_cast<int64_t>(c10::elementSize(bucket.plan().dtype));
    };
    for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) {
      const BucketSlot& planned = bucket.plan().slots[slot];
      const ShardRange own = bucket.own(slot);
      if (own.numel == 0) continue;
      const int64_t begin = part.begin + bytes_of(planned.offset + own.begin);
      const int64_t end = begin + bytes_of(own.numel);
      pass_over(begin);
      const auto element = static_cast<int64_t>(c10::elementSize(real));
      while (stream_->collected() < end) {
        const int64_t from = stream_->collected();
        const auto sink = [&](std::byte* sums, int64_t offset, int64_t bytes) {
          visit({planned.parameter,
                 (from + offset - begin) / element,
                 {sums, real, bytes / element}});
        };
        if (stream_->collect(sink, real, end - from) == 0)
          stream_->wait("reduce_scatter of " + (*labels_)[collecting_]);
      }
    }
    pass_over(part.begin + part.padded);
  }
}

void StreamTransport::stop_deferring() {
  defers_ = false;
  if (!parts_.empty()) wait_for(parts_.size() - 1);
}

// A bucket of the step, as a collective in flight.
class StreamTransport::Arrival final : public Pending::State {
 public:
  Arrival(StreamTransport& stream, size_t bucket) : stream_(stream), bucket_(bucket) {}
  bool done() const override { return stream_.is_done(bucket_); }
  void wait() override { stream_.wait_for(bucket_); }
  std::optional<Pending::Clock::time_point> finished_at() const override {
    return stream_.collected_at_[bucket_];
  }

 private:
  StreamTransport& stream_;
  size_t bucket_;
};

Pending StreamTransport::launch(const TransportBucket& request) {
  return Pending(std::make_unique<Arrival>(*this, request.index));
}

}  // namespace trireme
