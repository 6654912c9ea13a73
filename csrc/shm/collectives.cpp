#include <trireme/shm/collectives_scope.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace trireme::shm {
namespace {

std::vector<int64_t> sizes_of(const std::vector<Pieces>& pieces) {
  std::vector<int64_t> sizes;
  for (const Pieces& piece : pieces) sizes.push_back(piece.bytes());
  return sizes;
}

// Copies a rank's own part, which never leaves its memory.
void keep_own(const Pieces& output, const Pieces& input) {
  output.visit(0, output.bytes(), [&](std::byte* out, int64_t position, int64_t length) {
    input.visit(position, length, [&](const std::byte* in, int64_t offset, int64_t bytes) {
      if (out + offset != in) std::memmove(out + offset, in, static_cast<size_t>(bytes));
    });
  });
}

}  // namespace

// Each rank sends the same data to all; ranks with an output for them read them.
void Collectives::multicast(Scope& scope, const Sizes& sizes, const Pieces& input,
                            const std::vector<Pieces>& outputs) {
  const int64_t rank = group_.rank();
  const bool in_place = !outputs.empty() && outputs[static_cast<size_t>(rank)].is_same(input);
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const auto [part, chunks] = Chunks(longest, ring_.largest_slot());
  std::array<Slot, 2> slots;
  for (int64_t k = 0; k < chunks + 1; ++k) {
    if (k < chunks) {
      Slot& slot = slots[static_cast<size_t>(k) % 2] = scope.reserve(part);
      const int64_t length = part_of(sizes[static_cast<size_t>(rank)], k, part);
      if (length > 0) {
        copy_in(ring_.of(rank, slot), input, k * part, length);
        group_.publish(&RankBlock::arrived, slot.step);
      }
    }
    if (const int64_t c = k - 1; c >= 0) {
      const Slot& slot = slots[static_cast<size_t>(c) % 2];
      scope.check();
      for (int64_t peer = 0; peer < group_.world() && !outputs.empty(); ++peer) {
        const Pieces& output = outputs[static_cast<size_t>(peer)];
        const int64_t length = part_of(output.bytes(), c, part);
        if (length == 0 || (peer == rank && in_place)) continue;
        if (peer != rank) group_.wait(peer, &RankBlock::arrived, slot.step);
        copy_out(output, c * part, ring_.of(peer, slot), length);
      }
      group_.publish(&RankBlock::consumed, slot.step);
    }
  }
  scope.check();
}

// Each rank sends other data to each other rank: sizes[s][d] bytes from s to d.
void Collectives::exchange(Scope& scope, const std::vector<Sizes>& sizes,
                           const std::vector<Pieces>& inputs, const std::vector<Pieces>& outputs) {
  const int64_t world = group_.world();
  const int64_t rank = group_.rank();
  int64_t longest = 0;
  for (int64_t s = 0; s < world; ++s)
    for (int64_t d = 0; d < world; ++d)
      if (s != d)
        longest = std::max(longest, sizes[static_cast<size_t>(s)][static_cast<size_t>(d)]);
  const auto [part, chunks] = Chunks(longest, ring_.largest_slot() / world);
  std::array<Slot, 2> slots;
  for (int64_t k = 0; k < chunks + 1; ++k) {
    if (k < chunks) {
      Slot& slot = slots[static_cast<size_t>(k) % 2] = scope.reserve(part * world);
      for (int64_t to = 0; to < world && !inputs.empty(); ++to) {
        const Pieces& input = inputs[static_cast<size_t>(to)];
        if (to == rank) continue;
        copy_in(ring_.of(rank, slot) + to * part, input, k * part, part_of(input.bytes(), k, part));
      }
      group_.publish(&RankBlock::arrived, slot.step);
    }
    if (const int64_t c = k - 1; c >= 0) {
      const Slot& slot = slots[static_cast<size_t>(c) % 2];
      scope.check();
      for (int64_t from = 0; from < world && !outputs.empty(); ++from) {
        const Pieces& output = outputs[static_cast<size_t>(from)];
        const int64_t length = part_of(output.bytes(), c, part);
        if (from == rank || length == 0) continue;
        group_.wait(from, &RankBlock::arrived, slot.step);
        copy_out(output, c * part, ring_.of(from, slot) + rank * part, length);
      }
      group_.publish(&RankBlock::consumed, slot.step);
    }
  }
  scope.check();
}

void Collectives::all_gather(const std::vector<Pieces>& outputs, const Pieces& input, Dtype dtype,
                             const CallOptions& call) {
  Scope scope(*this,
              {.verb = Verb::kAllGather,
               .dtype = dtype,
               .count = total_of(outputs) / element_bytes(dtype),
               .shapes_hash = mix(hash_of(outputs), call.list_hash),
               .label = call.label},
              call);
  multicast(scope, sizes_of(outputs), input, outputs);
}

void Collectives::broadcast(const Pieces& memory, int64_t root, Dtype dtype,
                            const CallOptions& call) {
  Scope scope(*this,
              {.verb = Verb::kBroadcast,
               .dtype = dtype,
               .root = static_cast<int32_t>(root),
               .count = memory.bytes() / element_bytes(dtype),
               .label = call.label},
              call);
  Sizes sizes(static_cast<size_t>(group_.world()), 0);
  sizes[static_cast<size_t>(root)] = memory.bytes();
  std::vector<Pieces> outputs(sizes.size());
  if (group_.rank() != root) outputs[static_cast<size_t>(root)] = memory;
  multicast(scope, sizes, memory, outputs);
}

void Collectives::gather(const std::vector<Pieces>& outputs, const Pieces& input, int64_t root,
                         Dtype dtype, const CallOptions& call) {
  Scope scope(*this,
              {.verb = Verb::kGather,
               .dtype = dtype,
               .root = static_cast<int32_t>(root),
               .count = input.bytes() / element_bytes(dtype),
               .label = call.label},
              call);
  const Sizes sizes(static_cast<size_t>(group_.world()), input.bytes());
  multicast(scope, sizes, input, group_.rank() == root ? outputs : std::vector<Pieces>{});
}

void Collectives::scatter(const Pieces& output, const std::vector<Pieces>& inputs, int64_t root,
                          Dtype dtype, const CallOptions& call) {
  Scope scope(*this,
              {.verb = Verb::kScatter,
               .dtype = dtype,
               .root = static_cast<int32_t>(root),
               .count = output.bytes() / element_bytes(dtype),
               .label = call.label},
              call);
  const auto world = static_cast<size_t>(group_.world());
  std::vector<Sizes> sizes(world, Sizes(world, 0));
  sizes[static_cast<size_t>(root)].assign(world, output.bytes());
  const bool is_root = group_.rank() == root;
  std::vector<Pieces> outputs(world);
  if (!is_root) outputs[static_cast<size_t>(root)] = output;
  exchange(scope, sizes, is_root ? inputs : std::vector<Pieces>{}, outputs);
  if (is_root) keep_own(output, inputs[static_cast<size_t>(root)]);
}

void Collectives::all_to_all(const std::vector<Pieces>& outputs, const std::vector<Pieces>& inputs,
                             Dtype dtype, const CallOptions& call) {
  Scope scope(*this, {.verb = Verb::kAllToAll, .dtype = dtype, .label = call.label}, call);
  exchange(scope, sizes_of_all(scope, sizes_of(inputs), sizes_of(outputs)), inputs, outputs);
  const auto rank = static_cast<size_t>(group_.rank());
  keep_own(outputs[rank], inputs[rank]);
}

// Every rank tells its sizes to all; the receiver of each message must expect its size.
std::vector<Collectives::Sizes> Collectives::sizes_of_all(Scope& scope, const Sizes& inputs,
                                                          const Sizes& outputs) {
  const auto world = static_cast<size_t>(group_.world());
  const Slot slot = scope.reserve(static_cast<int64_t>(2 * world * sizeof(int64_t)));
  std::byte* mine = ring_.of(group_.rank(), slot);
  std::memcpy(mine, inputs.data(), world * sizeof(int64_t));
  std::memcpy(mine + world * sizeof(int64_t), outputs.data(), world * sizeof(int64_t));
  group_.publish(&RankBlock::arrived, slot.step);
  scope.check();
  std::vector<Sizes> sent(world, Sizes(world));
  std::vector<Sizes> expected(world, Sizes(world));
  for (size_t peer = 0; peer < world; ++peer) {
    const auto index = static_cast<int64_t>(peer);
    if (index != group_.rank()) group_.wait(index, &RankBlock::arrived, slot.step);
    const std::byte* theirs = ring_.of(index, slot);
    std::memcpy(sent[peer].data(), theirs, world * sizeof(int64_t));
    std::memcpy(expected[peer].data(), theirs + world * sizeof(int64_t), world * sizeof(int64_t));
  }
  group_.publish(&RankBlock::consumed, slot.step);
  for (size_t from = 0; from < world; ++from) {
    for (size_t to = 0; to < world; ++to) {
      if (sent[from][to] == expected[to][from]) continue;
      const auto& members = group_.members();
      throw Fault(
          FaultKind::kMismatch,
          error_text("host_group",
                     "all_to_all: rank " + std::to_string(members[from]) + " sends " +
                         std::to_string(sent[from][to]) + " bytes to rank " +
                         std::to_string(members[to]) + ", which expects " +
                         std::to_string(expected[to][from]),
                     group_.where(), "Let the split sizes of both agree; nothing was moved."));
    }
  }
  return sent;
}

std::vector<Segment> Collectives::share_segments(int64_t bytes, const CallOptions& call) {
  Scope scope(*this, {.verb = Verb::kShare, .count = bytes, .label = call.label}, call);
  scope.check();
  return group_.share_segments(bytes);
}

SharedSegment Collectives::share_segment(int64_t bytes, const CallOptions& call) {
  Scope scope(*this, {.verb = Verb::kShare, .root = 0, .count = bytes, .label = call.label}, call);
  scope.check();
  return group_.share_segment(bytes);
}

void Collectives::barrier(const CallOptions& call) {
  meet({.verb = Verb::kBarrier, .label = call.label}, call);
}

void Collectives::roll_call(const CallOptions& call) {
  Scope scope(*this, {.verb = Verb::kBarrier, .label = call.label}, call);
  group_.roll_call();
  scope.check();
}

void Collectives::meet(const Operation& operation, const CallOptions& call) {
  Scope scope(*this, operation, call);
  scope.check();
}

void Collectives::refuse(std::string_view reason, const CallOptions& call) {
  Scope scope(*this, {.verb = Verb::kRefused, .label = reason}, call);
  scope.check();
  throw Fault(FaultKind::kMismatch,
              error_text("host_group", std::string(reason), group_.where(),
                         "Every rank was called like this; nothing was moved."));
}

}  // namespace trireme::shm
