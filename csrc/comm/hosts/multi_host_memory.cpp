// Memory that the ranks of each host share, in a group on several hosts, and the values of other
// hosts in it.

#include <trireme/comm/hosts/multi_host_stages.h>
#include <trireme/shm/collectives_scope.h>

#include <array>
#include <cstring>

namespace trireme {

using shm::CallOptions;
using shm::Pieces;

namespace {

// Returns the place of `memory`, if it is one run.
std::byte* in_one_run(const Pieces& memory) {
  std::byte* run = nullptr;
  memory.visit(0, memory.bytes(), [&](std::byte* data, int64_t, int64_t bytes) {
    if (bytes == memory.bytes()) run = data;
  });
  return run;
}

}  // namespace

// Every host sends the parts of its ranks, once, to each other host. Long runs go from memory to
// memory, the rest through the room of a chunk.
class MultiHostCollectives::Placing final : private Stages {
 public:
  Placing(MultiHostCollectives& owner, const Scope& scope, const std::vector<Pieces>& parts)
      : Stages(owner, scope), shares_(layout_, parts) {}

  int64_t chunks() const { return layout_.has_leg() ? shares_.chunks() : 0; }

  void start_chunk(int64_t k) {
    const Pieces mine = share_of(k, layout_.host);
    std::byte* sent = in_one_run(mine);
    if (sent == nullptr && mine.bytes() > 0) {
      sent = room(k).partial(mine.bytes());
      copy_pieces({sent, mine.bytes()}, mine);
    }
    visit_arriving(k, [&](int64_t host, const Pieces& theirs, std::byte* in_room) {
      std::byte* place = in_one_run(theirs);
      recv(k, host, place != nullptr ? place : in_room, theirs.bytes());
      send(k, host, sent, mine.bytes());
    });
  }

  void cross_chunk(int64_t k) { land(k); }

  void deliver_chunk(int64_t k) {
    visit_arriving(k, [&](int64_t, const Pieces& theirs, std::byte* in_room) {
      if (in_one_run(theirs) == nullptr) copy_pieces(theirs, {in_room, theirs.bytes()});
    });
  }

 private:
  Pieces share_of(int64_t k, int64_t host) const {
    Pieces share;
    shares_.add(share, k, host, layout_.place);
    return share;
  }

  // Calls visit(host, where its share belongs, where that has room meanwhile).
  template <typename Visit>
  void visit_arriving(int64_t k, const Visit& visit) {
    int64_t bytes = 0;
    layout_.others([&](int64_t host) { bytes += shares_.size(k, host, layout_.place); });
    std::byte* in_room = room(k).received(bytes);
    layout_.others([&](int64_t host) {
      const Pieces theirs = share_of(k, host);
      visit(host, theirs, in_room);
      in_room += theirs.bytes();
    });
  }

  Shares shares_;
};

void MultiHostCollectives::all_gather_in_host(const std::vector<Pieces>& parts,
                                              const CallOptions& call) {
  constexpr uint64_t kInHost = 1;  // tells it from an all_gather of the same shapes
  run({.verb = shm::Verb::kAllGather,
       .count = shm::total_of(parts),
       .shapes_hash = shm::mix(shm::hash_of(parts), kInHost),
       .label = call.label},
      call, [&](const Scope& scope) {
        Placing stages(*this, scope, parts);
        in_chunks(stages.chunks(), stages);
        scope.barrier();
      });
}

shm::SharedSegment MultiHostCollectives::share_segment(int64_t bytes, const CallOptions& call) {
  shm::SharedSegment shared;
  run({.verb = shm::Verb::kShare, .root = 0, .count = bytes, .label = call.label}, call,
      [&](const Scope& scope) { shared = scope.share_segment(bytes); });

  using Text = std::array<char, 512>;  // why a rank has none
  const auto pieces_of = [](Text& text) {
    return Pieces(reinterpret_cast<std::byte*>(text.data()), sizeof(Text));
  };
  Text own{};
  std::memcpy(own.data(), shared.why_not.data(), std::min(shared.why_not.size(), own.size() - 1));
  std::vector<Text> texts(static_cast<size_t>(world()));
  std::vector<Pieces> places;
  for (Text& text : texts) places.push_back(pieces_of(text));
  all_gather(places, pieces_of(own), shm::Dtype::kBytes, call);
  for (const Text& text : texts) {
    if (text.front() == '\0') continue;
    shared.segment = shm::Segment();
    shared.why_not = text.data();
    break;
  }
  return shared;
}

}  // namespace trireme
