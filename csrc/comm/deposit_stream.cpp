#include <trireme/comm/deposit_stream.h>

#include <trireme/comm/shm_tensors.h>
#include <trireme/comm/translate_faults.h>
#include <trireme/shm/deposit_ring.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace trireme {

DepositStream::DepositStream(std::unique_ptr<shm::DepositRing> ring, shm::HostGroup& group,
                             std::shared_ptr<void> keeps_alive)
    : keeps_alive_(std::move(keeps_alive)),
      ring_(std::move(ring)),
      world_(group.world()),
      group_(group) {}

DepositStream::~DepositStream() = default;

void DepositStream::begin_round(const Round& round) {
  translate_faults([&] {
    ring_->begin_round({.verb = shm::Verb::kDeposit,
                        .dtype = shm::Dtype::kBytes,
                        .count = round.bytes,
                        .shapes_hash = round.layout_hash,
                        .label = round.label},
                       group_.timeout());
  });
}

std::span<std::byte> DepositStream::room(int64_t bytes) { return ring_->room(bytes); }

void DepositStream::deposit(int64_t bytes) { ring_->deposit(bytes); }

void DepositStream::show(std::string_view name) { group_.show_deposit(name); }

int64_t DepositStream::collect(std::byte* sums, at::ScalarType dtype, int64_t bytes) {
  return translate_faults([&] {
    const int64_t ready = ring_->ready(bytes);
    if (ready == 0) return ready;
    if (sums != nullptr) sum_up(sums, dtype, ready, nullptr);
    ring_->collect(ready);
    return ready;
  });
}

int64_t DepositStream::collect(const Sink& sink, at::ScalarType dtype, int64_t bytes) {
  return translate_faults([&] {
    const int64_t ready = ring_->ready(bytes);
    sum_up(nullptr, dtype, ready, &sink);
    if (ready > 0) ring_->collect(ready);
    return ready;
  });
}

// Writes past the caches, by way of a piece that stays in the nearest one: the sums are not read
// again before the optimizer runs, whereas the data that they would push out are.
void DepositStream::sum_up(std::byte* sums, at::ScalarType dtype, int64_t bytes,
                           const Sink* sink) const {
  constexpr int64_t kPieceBytes = 16 * 1024;
  alignas(64) std::array<std::byte, kPieceBytes> piece;
  std::vector<const void*> sources(static_cast<size_t>(world_));
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t offset = 0; offset < bytes; offset += kPieceBytes) {
    for (int64_t rank = 0; rank < world_; ++rank)
      sources[static_cast<size_t>(rank)] = ring_->of(rank) + offset;
    const int64_t length = std::min(kPieceBytes, bytes - offset);
    shm::reduce(piece.data(), sink == nullptr ? sums + offset : nullptr,
                {.dtype = shm_dtype(dtype),
                 .op = shm::ReduceOp::kSum,
                 .numel = length / element,
                 .sources = {sources.data(), sources.size()}},
                /*stream_second=*/true);
    if (sink != nullptr) (*sink)(piece.data(), offset, length);
  }
}

int64_t DepositStream::deposited() const { return ring_->deposited(); }
int64_t DepositStream::collected() const { return ring_->collected(); }

void DepositStream::wait(std::string_view name) {
  translate_faults([&] { ring_->wait(name); });
}

}  // namespace trireme
