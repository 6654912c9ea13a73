#include <trireme/shm/byte_ring.h>

#include <trireme/shm/reduce.h>

#include <algorithm>

namespace trireme::shm {
namespace {

// Calls visit(place, offset, length) for the one or two runs of a ring that hold the bytes from
// `position` on.
template <typename Visit>
void visit_runs(uint64_t position, int64_t bytes, int64_t capacity, Visit&& visit) {
  const auto begin = static_cast<int64_t>(position % static_cast<uint64_t>(capacity));
  const int64_t first = std::min(bytes, capacity - begin);
  if (first > 0) visit(begin, int64_t{0}, first);
  if (bytes > first) visit(int64_t{0}, first, bytes - first);
}

}  // namespace

void RingWriter::write(const std::byte* from, int64_t bytes) {
  visit_runs(position_, bytes, capacity_, [&](int64_t place, int64_t offset, int64_t length) {
    shm::copy(block_->bytes() + place, from + offset, length);
  });
  position_ += static_cast<uint64_t>(bytes);
}

void RingReader::read(std::byte* to, int64_t bytes) {
  if (to != nullptr) {
    visit_runs(position_, bytes, capacity_, [&](int64_t place, int64_t offset, int64_t length) {
      shm::copy(to + offset, block_->bytes() + place, length);
    });
  }
  position_ += static_cast<uint64_t>(bytes);
}

}  // namespace trireme::shm
