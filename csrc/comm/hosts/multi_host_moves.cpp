// The collectives over several hosts that move data, and reduce nothing.

#include <trireme/comm/hosts/multi_host_stages.h>
#include <trireme/shm/collectives_scope.h>

namespace trireme {

using shm::CallOptions;
using shm::Pieces;

// Every host sends the data of its ranks, once, to each other host.
class MultiHostCollectives::Gathering final : private Stages {
 public:
  Gathering(MultiHostCollectives& owner, const Scope& scope, const std::vector<Pieces>& outputs)
      : Stages(owner, scope), shares_(layout_, outputs) {}

  int64_t chunks() const { return shares_.chunks(); }

  void start_chunk(int64_t k) {
    if (!layout_.has_leg()) return;
    Pieces share;
    shares_.add(share, k, layout_.host, layout_.place);
    const Pieces sent(room(k).partial(share.bytes()), share.bytes());
    copy_pieces(sent, share);
    std::byte* received = room(k).received(received_bytes(k));
    layout_.others([&](int64_t host) {
      const int64_t theirs = shares_.size(k, host, layout_.place);
      recv(k, host, received, theirs);
      send(k, host, room(k).partial(share.bytes()), share.bytes());
      received += theirs;
    });
  }

  void cross_chunk(int64_t k) {
    if (layout_.has_leg()) land(k);
  }

  void deliver_chunk(int64_t k) {
    std::vector<Pieces> by_leg(static_cast<size_t>(layout_.ranks_here()));
    for (int64_t leg = 0; leg < layout_.legs; ++leg) {
      layout_.others(
          [&](int64_t host) { shares_.add(by_leg[static_cast<size_t>(leg)], k, host, leg); });
    }
    Pieces mine;
    if (layout_.has_leg()) mine = Pieces(room(k).received(received_bytes(k)), received_bytes(k));
    scope_.all_gather(by_leg, mine);
  }

 private:
  int64_t received_bytes(int64_t k) const {
    int64_t bytes = 0;
    layout_.others([&](int64_t host) { bytes += shares_.size(k, host, layout_.place); });
    return bytes;
  }

  Shares shares_;
};

// Moves data from host to host in a chain, so that they leave each of them once.
class MultiHostCollectives::Casting final : public SlicedStages {
 public:
  Casting(MultiHostCollectives& owner, const Scope& scope, const Pieces& memory, int64_t root)
      : SlicedStages(owner, scope, memory),
        root_host_(layout_.host_of(root)),
        root_place_(layout_.place_of(root)),
        next_((layout_.host + 1) % layout_.count()),
        previous_((layout_.host + layout_.count() - 1) % layout_.count()) {}

  void start_chunk(int64_t k) {
    if (has_root()) scope_.broadcast(range_of(memory_, k * chunk_bytes_, bytes_of(k)), root_place_);
    if (!layout_.has_leg()) return;
    const Pieces slice = slice_of(k);
    if (has_root()) {
      copy_pieces(slice, slices_of(k)[static_cast<size_t>(layout_.place)]);
      send(k, next_, room(k).partial(slice.bytes()), slice.bytes());
    } else {
      recv(k, previous_, room(k).partial(slice.bytes()), slice.bytes());
    }
  }

  void cross_chunk(int64_t k) {
    if (!layout_.has_leg() || has_root()) return;
    land(k);
    const int64_t bytes = slice_of(k).bytes();
    if (next_ != root_host_) send(k, next_, room(k).partial(bytes), bytes);
  }

  void deliver_chunk(int64_t k) {
    if (layout_.has_leg()) land(k);
    if (!has_root()) scope_.all_gather(slices_of(k), slice_of(k));
  }

 private:
  bool has_root() const { return layout_.host == root_host_; }

  int64_t root_host_;
  int64_t root_place_;
  int64_t next_;
  int64_t previous_;
};

void MultiHostCollectives::all_gather(const std::vector<Pieces>& outputs, const Pieces& input,
                                      shm::Dtype dtype, const CallOptions& call) {
  run({.verb = shm::Verb::kAllGather,
       .dtype = dtype,
       .count = shm::total_of(outputs) / shm::element_bytes(dtype),
       .shapes_hash = shm::mix(shm::hash_of(outputs), call.list_hash),
       .label = call.label},
      call, [&](const Scope& scope) {
        std::vector<Pieces> of_host;
        for (const int64_t rank : layout_.here())
          of_host.push_back(outputs[static_cast<size_t>(rank)]);
        scope.all_gather(of_host, input);
        Gathering stages(*this, scope, outputs);
        in_chunks(stages.chunks(), stages);
      });
}

void MultiHostCollectives::broadcast(const Pieces& memory, int64_t root, shm::Dtype dtype,
                                     const CallOptions& call) {
  run({.verb = shm::Verb::kBroadcast,
       .dtype = dtype,
       .root = static_cast<int32_t>(root),
       .count = memory.bytes() / shm::element_bytes(dtype),
       .label = call.label},
      call, [&](const Scope& scope) {
        Casting stages(*this, scope, memory, root);
        in_chunks(stages.chunks(), stages);
      });
}

void MultiHostCollectives::barrier(const CallOptions& call) {
  run({.verb = shm::Verb::kBarrier, .label = call.label}, call, [](const Scope&) {});
}

void MultiHostCollectives::refuse(std::string_view reason, const CallOptions& call) {
  run({.verb = shm::Verb::kRefused, .label = reason}, call, [](const Scope&) {});
}

}  // namespace trireme
