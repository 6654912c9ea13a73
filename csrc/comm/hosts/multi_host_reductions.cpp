#include <trireme/comm/hosts/multi_host_stages.h>
#include <trireme/shm/collectives_scope.h>

namespace trireme {

using shm::CallOptions;
using shm::Pieces;
using shm::ReduceOptions;

namespace {

// Up to here every host sums everything, and always if there are two hosts: one journey instead of
// two, and between two hosts the same bytes.
constexpr int64_t kFlatBytes = 16 * 1024;

// Returns the reduction among the ranks of a host before their sums travel.
ReduceOptions on_host(ReduceOptions how) {
  if (how.op == shm::ReduceOp::kAvg) how.op = shm::ReduceOp::kSum;
  return how;
}

}  // namespace

// An all-reduce or, with a root, a reduce.
class MultiHostCollectives::Summing final : public SlicedStages {
 public:
  Summing(MultiHostCollectives& owner, const Scope& scope, const Pieces& memory,
          const ReduceOptions& how, int64_t root)
      : SlicedStages(owner, scope, memory),
        how_(how),
        root_(root),
        root_host_(root < 0 ? -1 : layout_.host_of(root)) {}

  // Each leg gets its slice, summed over the host.
  void start_chunk(int64_t k) {
    const std::vector<Pieces> slices = slices_of(k);
    const Pieces slice = slice_of(k);
    scope_.reduce_scatter(slice, slices, on_host(how_));
    if (!layout_.has_leg()) return;
    const Run mine = summed_by(layout_.host, slice.bytes());
    std::byte* received = room(k).received(mine.bytes * layout_.count());
    layout_.others([&](int64_t host) {
      const Run theirs = summed_by(host, slice.bytes());
      recv(k, host, received + host * mine.bytes, mine.bytes);
      send(k, host, room(k).partial(slice.bytes()) + theirs.begin, theirs.bytes);
    });
  }

  void cross_chunk(int64_t k) {
    if (!layout_.has_leg()) return;
    land(k);
    const int64_t bytes = slice_of(k).bytes();
    const Run mine = summed_by(layout_.host, bytes);
    std::byte* partial = room(k).partial(bytes);
    sum_hosts(k, partial + mine.begin, mine.bytes, how_);
    if (root_ >= 0 || is_flat(bytes)) return;
    layout_.others([&](int64_t host) {
      const Run theirs = summed_by(host, bytes);
      recv(k, host, partial + theirs.begin, theirs.bytes);
      send(k, host, partial + mine.begin, mine.bytes);
    });
  }

  // Gives all slices to every rank, or to the root.
  void deliver_chunk(int64_t k) {
    if (layout_.has_leg()) land(k);
    if (root_ < 0) return scope_.all_gather(slices_of(k), slice_of(k));
    if (root_host_ != layout_.host) return;
    std::vector<Pieces> to(static_cast<size_t>(layout_.ranks_here()));
    to[static_cast<size_t>(layout_.place_of(root_))] = slice_of(k);
    std::vector<Pieces> from(to.size());
    if (root_ == owner_.group_.where().rank) from = slices_of(k);
    scope_.all_to_all(from, to);
  }

 private:
  struct Run {
    int64_t begin = 0;
    int64_t bytes = 0;
  };

  bool is_flat(int64_t bytes) const { return layout_.count() == 2 || bytes <= kFlatBytes; }

  // Returns the part of a slice that a host sums.
  Run summed_by(int64_t host, int64_t slice_bytes) const {
    if (root_ >= 0) return {0, host == root_host_ ? slice_bytes : 0};
    if (is_flat(slice_bytes)) return {0, slice_bytes};
    const Runs runs(slice_bytes, layout_.count());
    return {runs.begin(host), runs.size(host)};
  }

  const ReduceOptions& how_;
  int64_t root_;
  int64_t root_host_;
};

// Every host sums its own ranks' data for each other host, and sends the sums there.
class MultiHostCollectives::Scattering final : private Stages {
 public:
  Scattering(MultiHostCollectives& owner, const Scope& scope, const Pieces& output,
             const std::vector<Pieces>& inputs, const ReduceOptions& how)
      : Stages(owner, scope), output_(output), how_(how), shares_(layout_, inputs) {}

  int64_t chunks() const { return shares_.chunks(); }

  void start_chunk(int64_t k) {
    std::vector<Pieces> by_leg(static_cast<size_t>(layout_.ranks_here()));
    for (int64_t leg = 0; leg < layout_.legs; ++leg)
      for (int64_t host = 0; host < layout_.count(); ++host)
        shares_.add(by_leg[static_cast<size_t>(leg)], k, host, leg);
    if (!layout_.has_leg()) {
      scope_.reduce_scatter({}, by_leg, on_host(how_));
      return;
    }
    const int64_t bytes = by_leg[static_cast<size_t>(layout_.place)].bytes();
    std::byte* partial = room(k).partial(bytes);
    scope_.reduce_scatter({partial, bytes}, by_leg, on_host(how_));
    const int64_t mine = shares_.size(k, layout_.host, layout_.place);
    std::byte* received = room(k).received(mine * layout_.count());
    int64_t offset = 0;
    for (int64_t host = 0; host < layout_.count(); ++host) {
      const int64_t theirs = shares_.size(k, host, layout_.place);
      if (host != layout_.host) {
        recv(k, host, received + host * mine, mine);
        send(k, host, partial + offset, theirs);
      }
      offset += theirs;
    }
  }

  void cross_chunk(int64_t k) {
    if (!layout_.has_leg()) return;
    land(k);
    const Pieces mine = summed(k);
    mine.visit(0, mine.bytes(), [&](std::byte* data, int64_t, int64_t bytes) {  // one piece
      sum_hosts(k, data, bytes, how_);
    });
  }

  // Moves shares from the rank at the leg's end to those that it carries.
  void deliver_chunk(int64_t k) {
    const auto ranks_here = static_cast<size_t>(layout_.ranks_here());
    std::vector<Pieces> to(ranks_here);
    std::vector<Pieces> from(ranks_here);
    const Pieces mine = layout_.has_leg() ? summed(k) : Pieces();
    int64_t offset = 0;
    for (int64_t place = layout_.place; layout_.has_leg() && place < layout_.ranks_here();
         place += layout_.legs) {
      const int64_t bytes = shares_.size_of(k, layout_.here()[static_cast<size_t>(place)]);
      to[static_cast<size_t>(place)] = range_of(mine, offset, bytes);
      offset += bytes;
    }
    const int64_t own = shares_.size_of(k, owner_.group_.where().rank);
    const int64_t carrier = layout_.place % layout_.legs;
    from[static_cast<size_t>(carrier)] = range_of(output_, shares_.begin(k), own);
    if (layout_.ranks_here() > layout_.legs) return scope_.all_to_all(from, to);
    copy_pieces(from[static_cast<size_t>(carrier)], mine);
  }

 private:
  // Returns this leg's share of this host, in the room: the shares of the hosts before it lie in
  // front.
  Pieces summed(int64_t k) const {
    int64_t before = 0;
    for (int64_t host = 0; host < layout_.host; ++host)
      before += shares_.size(k, host, layout_.place);
    const int64_t mine = shares_.size(k, layout_.host, layout_.place);
    return {room(k).partial(before + mine) + before, mine};
  }

  const Pieces& output_;
  const ReduceOptions& how_;
  Shares shares_;
};

void MultiHostCollectives::check_reducible(const ReduceOptions& how, const CallOptions& call) {
  if (const auto why = shm::refusal(how.op, how.dtype)) {
    refuse(std::string(name(how.op)) + " of " + std::string(name(how.dtype)) + ": " +
               std::string(*why),
           call);
  }
}

void MultiHostCollectives::all_reduce(const Pieces& memory, const ReduceOptions& how,
                                      const CallOptions& call) {
  sum({.verb = shm::Verb::kAllReduce}, memory, how, call);
}

void MultiHostCollectives::reduce(const Pieces& memory, int64_t root, const ReduceOptions& how,
                                  const CallOptions& call) {
  sum({.verb = shm::Verb::kReduce, .root = static_cast<int32_t>(root)}, memory, how, call);
}

void MultiHostCollectives::sum(shm::Operation operation, const Pieces& memory,
                               const ReduceOptions& how, const CallOptions& call) {
  check_reducible(how, call);
  operation.dtype = how.dtype;
  operation.op = how.op;
  operation.count = memory.bytes() / shm::element_bytes(how.dtype);
  operation.shapes_hash = call.list_hash;
  operation.label = call.label;
  run(operation, call, [&](const Scope& scope) {
    Summing stages(*this, scope, memory, how, operation.root);
    in_chunks(stages.chunks(), stages);
  });
}

void MultiHostCollectives::reduce_scatter(const Pieces& output, const std::vector<Pieces>& inputs,
                                          const ReduceOptions& how, const CallOptions& call) {
  check_reducible(how, call);
  run({.verb = shm::Verb::kReduceScatter,
       .dtype = how.dtype,
       .op = how.op,
       .count = shm::total_of(inputs) / shm::element_bytes(how.dtype),
       .shapes_hash = shm::mix(shm::hash_of(inputs), call.list_hash),
       .label = call.label},
      call, [&](const Scope& scope) {
        Scattering stages(*this, scope, output, inputs, how);
        in_chunks(stages.chunks(), stages);
      });
}

}  // namespace trireme
