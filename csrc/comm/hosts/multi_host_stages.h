#pragma once

#include <trireme/comm/hosts/multi_host_scope.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace trireme {

constexpr int64_t kLegBytes = int64_t{1} << 20;  // of a chunk, by one leg
constexpr int64_t kElementsMeet = 64;            // whole elements of any dtype

// Runs three stages of a collective at once, on chunks k, k - 1 and k - 2: start (on the host),
// cross (between the hosts), deliver (on the host).
template <typename SomeStages>
void in_chunks(int64_t chunks, SomeStages& stages) {
  for (int64_t k = 0; k < chunks + 2; ++k) {
    if (k < chunks) stages.start_chunk(k);
    if (k >= 1 && k - 1 < chunks) stages.cross_chunk(k - 1);
    if (k >= 2) stages.deliver_chunk(k - 2);
  }
}

// `bytes` cut into `count` runs of whole elements, nearly equal.
struct Runs {
  Runs(int64_t all_bytes, int64_t count)
      : bytes(all_bytes),
        longest((bytes + count * kElementsMeet - 1) / (count * kElementsMeet) * kElementsMeet) {}
  int64_t begin(int64_t run) const { return std::min(run * longest, bytes); }
  int64_t size(int64_t run) const { return begin(run + 1) - begin(run); }

  int64_t bytes;
  int64_t longest;
};

inline void add_range(shm::Pieces& to, const shm::Pieces& from, int64_t begin, int64_t bytes) {
  from.visit(begin, bytes,
             [&](std::byte* data, int64_t, int64_t length) { to.add({data, length}); });
}

inline shm::Pieces range_of(const shm::Pieces& memory, int64_t begin, int64_t bytes) {
  shm::Pieces range;
  add_range(range, memory, begin, bytes);
  return range;
}

// Returns [begin, begin + bytes) by place on this host: for place j the slice of leg j, for places
// without a leg nothing.
inline std::vector<shm::Pieces> slices_by_leg(const HostLayout& layout, const shm::Pieces& memory,
                                              int64_t begin, int64_t bytes) {
  const Runs runs(bytes, layout.legs);
  std::vector<shm::Pieces> slices(static_cast<size_t>(layout.ranks_here()));
  for (int64_t leg = 0; leg < layout.legs; ++leg)
    slices[static_cast<size_t>(leg)] = range_of(memory, begin + runs.begin(leg), runs.size(leg));
  return slices;
}

// Copies pieces of the same size; parts that are the same memory stay.
inline void copy_pieces(const shm::Pieces& to, const shm::Pieces& from) {
  to.visit(0, to.bytes(), [&](std::byte* out, int64_t position, int64_t length) {
    from.visit(position, length, [&](const std::byte* in, int64_t offset, int64_t bytes) {
      if (out + offset != in) shm::copy(out + offset, in, bytes);
    });
  });
}

// The data for, or from, each rank of the group: a range of `of_ranks[rank]` in every chunk.
class Shares {
 public:
  Shares(const HostLayout& layout, const std::vector<shm::Pieces>& of_ranks)
      : layout_(layout), of_ranks_(of_ranks) {
    const int64_t carried = (layout.world + layout.legs - 1) / layout.legs;
    chunk_bytes_ = std::max(2 * kLegBytes / carried, kSmallest) / kElementsMeet * kElementsMeet;
    for (const shm::Pieces& pieces : of_ranks) longest_ = std::max(longest_, pieces.bytes());
  }

  int64_t chunks() const { return (longest_ + chunk_bytes_ - 1) / chunk_bytes_; }
  int64_t begin(int64_t k) const { return k * chunk_bytes_; }
  int64_t size_of(int64_t k, int64_t rank) const {
    const int64_t bytes = of_ranks_[static_cast<size_t>(rank)].bytes();
    return std::clamp<int64_t>(bytes - begin(k), 0, chunk_bytes_);
  }
  // Returns the bytes of a chunk for those ranks of the host that the leg carries.
  int64_t size(int64_t k, int64_t host, int64_t leg) const {
    int64_t bytes = 0;
    for (const int64_t rank : layout_.carried(host, leg)) bytes += size_of(k, rank);
    return bytes;
  }
  void add(shm::Pieces& to, int64_t k, int64_t host, int64_t leg) const {
    for (const int64_t rank : layout_.carried(host, leg))
      add_range(to, of_ranks_[static_cast<size_t>(rank)], begin(k), size_of(k, rank));
  }

 private:
  static constexpr int64_t kSmallest = 64 * 1024;

  const HostLayout& layout_;
  const std::vector<shm::Pieces>& of_ranks_;
  int64_t chunk_bytes_ = 0;
  int64_t longest_ = 0;
};

// The common part of the stages of all collectives: the room and the messages of each chunk.
class MultiHostCollectives::Stages {
 protected:
  Stages(MultiHostCollectives& owner, const Scope& scope)
      : owner_(owner),
        scope_(scope),
        layout_(owner.layout_),
        leg_(owner.leg_.get()),
        flights_{HostLeg::Flight(leg_), HostLeg::Flight(leg_), HostLeg::Flight(leg_)} {}

  Room& room(int64_t k) const { return owner_.room(k); }
  void send(int64_t k, int64_t host, const std::byte* data, int64_t bytes) {
    leg_->send(flight(k), host, data, bytes);
  }
  void recv(int64_t k, int64_t host, std::byte* data, int64_t bytes) {
    leg_->recv(flight(k), host, data, bytes);
  }
  void land(int64_t k) { scope_.land(flight(k)); }

  // Sums the received pieces of other hosts, `bytes` each by host, onto this host's `data`.
  void sum_hosts(int64_t k, std::byte* data, int64_t bytes, const shm::ReduceOptions& how) {
    if (bytes == 0) return;
    std::vector<const void*> sources;
    for (int64_t host = 0; host < layout_.count(); ++host) {
      sources.push_back(
          host == layout_.host ? data : room(k).received(bytes * layout_.count()) + host * bytes);
    }
    shm::ReduceRequest request;
    request.dtype = how.dtype;
    request.op = how.op == shm::ReduceOp::kPremulSum ? shm::ReduceOp::kSum : how.op;
    request.numel = bytes / shm::element_bytes(how.dtype);
    request.sources = sources;
    if (how.op == shm::ReduceOp::kAvg) request.terms = layout_.world;
    shm::reduce(data, nullptr, request, false);
  }

  MultiHostCollectives& owner_;
  const Scope& scope_;
  const HostLayout& layout_;

 private:
  HostLeg::Flight& flight(int64_t k) { return flights_[static_cast<size_t>(k) % flights_.size()]; }

  HostLeg* leg_;
  std::array<HostLeg::Flight, 3> flights_;
};

// The stages of collectives that move one piece of memory, a slice of each chunk by each leg.
class MultiHostCollectives::SlicedStages : protected Stages {
 public:
  int64_t chunks() const { return (memory_.bytes() + chunk_bytes_ - 1) / chunk_bytes_; }

 protected:
  SlicedStages(MultiHostCollectives& owner, const Scope& scope, const shm::Pieces& memory)
      : Stages(owner, scope), memory_(memory), chunk_bytes_(kLegBytes * layout_.legs) {}

  int64_t bytes_of(int64_t k) const {
    return std::min(memory_.bytes() - k * chunk_bytes_, chunk_bytes_);
  }

  // Returns slices of the caller's memory, by place.
  std::vector<shm::Pieces> slices_of(int64_t k) const {
    return slices_by_leg(layout_, memory_, k * chunk_bytes_, bytes_of(k));
  }

  // Returns this rank's slice, as it travels.
  shm::Pieces slice_of(int64_t k) const {
    if (!layout_.has_leg()) return {};
    const int64_t bytes = Runs(bytes_of(k), layout_.legs).size(layout_.place);
    return {room(k).partial(bytes), bytes};
  }

  const shm::Pieces& memory_;
  int64_t chunk_bytes_;
};

}  // namespace trireme
