#include <trireme/saving/chunk_hasher.h>

#include <algorithm>

namespace trireme {

ChunkHasher::ChunkHasher(const ChunkPlan& plan, int64_t rank, int64_t file_bytes,
                         int64_t chunk_bytes)
    : plan_(plan), rank_(rank), file_bytes_(file_bytes), chunk_bytes_(chunk_bytes) {}

void ChunkHasher::add(int64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const int64_t chunk = offset / chunk_bytes_;
    const auto count = std::min(bytes.size(), static_cast<size_t>(end_of(chunk) - offset));
    add_to(chunk, offset, bytes.substr(0, count));
    offset += static_cast<int64_t>(count);
    bytes.remove_prefix(count);
  }
}

int64_t ChunkHasher::end_of(int64_t chunk) const {
  return std::min((chunk + 1) * chunk_bytes_, file_bytes_);
}

void ChunkHasher::add_to(int64_t chunk, int64_t offset, std::string_view bytes) {
  const auto index = static_cast<size_t>(chunk);
  if (plan_.chunks[index] != ChunkPlan::Chunk{rank_, false}) return;
  if (offset == chunk * chunk_bytes_) {
    checksum_.reset();
    next_ = offset;
  }
  if (offset != next_) return;
  checksum_.add(bytes);
  next_ += static_cast<int64_t>(bytes.size());
  if (next_ == end_of(chunk)) found_[index] = checksum_.value();
}

}  // namespace trireme
