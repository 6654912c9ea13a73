#include <trireme/shm/collectives_scope.h>

#include <algorithm>
#include <array>

namespace trireme::shm {
namespace {

constexpr int64_t kFlatBytes = 16 * 1024;  // up to here every rank reduces everything

}  // namespace

// A reduction as the owner of a slice sees it.
struct Collectives::Reducing {
  Reducing(Scope& scope, HostGroup& group, const ReduceOptions& how, int64_t root)
      : dtype(how.dtype),
        op(how.op),
        element(element_bytes(how.dtype)),
        rank(group.rank()),
        gets_result(root < 0 || root == group.rank()),
        shares_result(group.world() > 1 && (root < 0 || root != group.rank())),
        sources(static_cast<size_t>(group.world())) {
    if (op != ReduceOp::kPremulSum) return;
    scope.check();
    for (int64_t peer = 0; peer < group.world(); ++peer)
      factors.push_back(scope.record_of(peer).factor);
  }

  // sources[.] are set for the range.
  void run(std::byte* dst, std::byte* second, int64_t bytes) const {
    ReduceRequest request;
    request.dtype = dtype;
    request.op = op;
    request.numel = bytes / element;
    request.sources = sources;
    request.factors = factors.empty() ? nullptr : factors.data();
    shm::reduce(dst, second, request, false);
  }

  Dtype dtype;
  ReduceOp op;
  int64_t element;
  int64_t rank;
  bool gets_result;
  bool shares_result;
  mutable std::vector<const void*> sources;  // one per rank
  std::vector<double> factors;               // factors of kPremulSum, one per rank
};

void Collectives::check_reducible(const ReduceOptions& how, const CallOptions& call) {
  if (const auto why = refusal(how.op, how.dtype)) {
    refuse(std::string(name(how.op)) + " of " + std::string(name(how.dtype)) + ": " +
               std::string(*why),
           call);
  }
}

void Collectives::all_reduce(const Pieces& memory, const ReduceOptions& how,
                             const CallOptions& call) {
  reduce_all({.verb = Verb::kAllReduce}, memory, how, call);
}

void Collectives::reduce(const Pieces& memory, int64_t root, const ReduceOptions& how,
                         const CallOptions& call) {
  reduce_all({.verb = Verb::kReduce, .root = static_cast<int32_t>(root)}, memory, how, call);
}

void Collectives::reduce_all(Operation operation, const Pieces& memory, const ReduceOptions& how,
                             const CallOptions& call) {
  check_reducible(how, call);
  operation.dtype = how.dtype;
  operation.op = how.op;
  operation.factor = how.factor;
  operation.count = memory.bytes() / element_bytes(how.dtype);
  operation.shapes_hash = call.list_hash;
  operation.label = call.label;
  Scope scope(*this, operation, call);
  const Reducing reducing(scope, group_, how, operation.root);
  memory.bytes() <= kFlatBytes ? reduce_flat(scope, memory, reducing)
                               : reduce_sliced(scope, memory, reducing);
  scope.check();
}

void Collectives::reduce_flat(Scope& scope, const Pieces& memory, const Reducing& reducing) {
  const Slot slot = scope.reserve(memory.bytes());
  copy_in(ring_.of(reducing.rank, slot), memory, 0, memory.bytes());
  group_.publish(&RankBlock::arrived, slot.step);
  scope.check();
  if (reducing.gets_result) {
    group_.wait_all(&RankBlock::arrived, slot.step);
    memory.visit(0, memory.bytes(), [&](std::byte* data, int64_t offset, int64_t bytes) {
      for (int64_t peer = 0; peer < group_.world(); ++peer)
        reducing.sources[static_cast<size_t>(peer)] = ring_.of(peer, slot) + offset;
      reducing.run(data, nullptr, bytes);
    });
  }
  group_.publish(&RankBlock::consumed, slot.step);
}

void Collectives::reduce_sliced(Scope& scope, const Pieces& memory, const Reducing& reducing) {
  const int64_t world = group_.world();
  const int64_t rank = reducing.rank;
  const int64_t chunk_bytes =
      std::min(world * kSliceBytes, ring_.largest_slot()) / (world * kLine) * (world * kLine);
  const int64_t chunks = (memory.bytes() + chunk_bytes - 1) / chunk_bytes;
  std::array<Slot, 4> slots;  // slots of the chunks in the pipeline
  const auto slot_of = [&](int64_t chunk) -> Slot& {
    return slots[static_cast<size_t>(chunk) % slots.size()];
  };
  // Rank r owns [r * slice, (r + 1) * slice) of a chunk.
  const auto bytes_of = [&](int64_t chunk) { return part_of(memory.bytes(), chunk, chunk_bytes); };
  const auto slice_of = [&](int64_t chunk) {
    return round_up((bytes_of(chunk) + world - 1) / world);
  };
  const auto begin_of = [&](int64_t chunk, int64_t owner) {
    return std::min(owner * slice_of(chunk), bytes_of(chunk));
  };

  for (int64_t k = 0; k < chunks + 2; ++k) {
    if (k < chunks) {  // what the others own of chunk k goes into my slot
      Slot& slot = slot_of(k) = scope.reserve(bytes_of(k));
      std::byte* mine = ring_.of(rank, slot);
      const int64_t begin = begin_of(k, rank);
      const int64_t end = begin_of(k, rank + 1);
      copy_in(mine, memory, k * chunk_bytes, begin);
      copy_in(mine + end, memory, k * chunk_bytes + end, bytes_of(k) - end);
      group_.publish(&RankBlock::arrived, slot.step);
    }
    if (const int64_t c = k - 1; c >= 0 && c < chunks) {  // my slice of it, into where it came from
      const Slot& slot = slot_of(c);
      scope.check();
      group_.wait_all(&RankBlock::arrived, slot.step);
      const int64_t begin = begin_of(c, rank);
      memory.visit(c * chunk_bytes + begin, begin_of(c, rank + 1) - begin,
                   [&](std::byte* data, int64_t offset, int64_t bytes) {
                     for (int64_t peer = 0; peer < world; ++peer) {
                       reducing.sources[static_cast<size_t>(peer)] =
                           peer == rank ? data : ring_.of(peer, slot) + begin + offset;
                     }
                     std::byte* hole = ring_.of(rank, slot) + begin + offset;
                     reducing.gets_result
                         ? reducing.run(data, reducing.shares_result ? hole : nullptr, bytes)
                         : reducing.run(hole, nullptr, bytes);
                   });
      group_.publish(&RankBlock::reduced, slot.step);
    }
    if (const int64_t c = k - 2; c >= 0) {  // the others' slices, out
      const Slot& slot = slot_of(c);
      for (int64_t owner = 0; reducing.gets_result && owner < world; ++owner) {
        if (owner == rank) continue;
        group_.wait(owner, &RankBlock::reduced, slot.step);
        const int64_t begin = begin_of(c, owner);
        copy_out(memory, c * chunk_bytes + begin, ring_.of(owner, slot) + begin,
                 begin_of(c, owner + 1) - begin);
      }
      group_.publish(&RankBlock::consumed, slot.step);
    }
  }
}

void Collectives::reduce_scatter(const Pieces& output, const std::vector<Pieces>& inputs,
                                 const ReduceOptions& how, const CallOptions& call) {
  check_reducible(how, call);
  const int64_t world = group_.world();
  const int64_t rank = group_.rank();
  Scope scope(*this,
              {.verb = Verb::kReduceScatter,
               .dtype = how.dtype,
               .op = how.op,
               .count = total_of(inputs) / element_bytes(how.dtype),
               .shapes_hash = mix(hash_of(inputs), call.list_hash),
               .label = call.label,
               .factor = how.factor},
              call);
  const Reducing reducing(scope, group_, how, rank);
  int64_t longest = 0;
  for (const Pieces& input : inputs) longest = std::max(longest, input.bytes());
  const Chunks split(longest, ring_.largest_slot() / world);
  const int64_t part = split.bytes;
  const int64_t chunks = split.count;
  std::array<Slot, 2> slots;
  for (int64_t k = 0; k < chunks + 1; ++k) {
    if (k < chunks) {  // what I have for others
      Slot& slot = slots[static_cast<size_t>(k) % 2] = scope.reserve(part * world);
      for (int64_t owner = 0; owner < world; ++owner) {
        const Pieces& input = inputs[static_cast<size_t>(owner)];
        if (owner == rank) continue;
        copy_in(ring_.of(rank, slot) + owner * part, input, k * part,
                part_of(input.bytes(), k, part));
      }
      group_.publish(&RankBlock::arrived, slot.step);
    }
    if (const int64_t c = k - 1; c >= 0) {
      const Slot& slot = slots[static_cast<size_t>(c) % 2];
      scope.check();
      const Pieces& own = inputs[static_cast<size_t>(rank)];
      if (part_of(own.bytes(), c, part) > 0) group_.wait_all(&RankBlock::arrived, slot.step);
      output.visit(
          c * part, part_of(output.bytes(), c, part),
          [&](std::byte* out, int64_t position, int64_t length) {
            own.visit(
                c * part + position, length, [&](std::byte* in, int64_t offset, int64_t bytes) {
                  for (int64_t peer = 0; peer < world; ++peer) {
                    reducing.sources[static_cast<size_t>(peer)] =
                        peer == rank ? in : ring_.of(peer, slot) + rank * part + position + offset;
                  }
                  reducing.run(out + offset, nullptr, bytes);
                });
          });
      group_.publish(&RankBlock::consumed, slot.step);
    }
  }
  scope.check();
}

}  // namespace trireme::shm
