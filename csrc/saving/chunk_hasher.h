#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checksum.h>
#include <trireme/saving/chunk_plan.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>

namespace trireme {

// The checksums of some chunks of a file, from its bytes as they are written: in ascending order,
// with gaps only where other ranks write. One thread at a time.
class TRIREME_API ChunkHasher {
 public:
  // Hashes what `plan` has this rank hash on its way. `plan` outlives it.
  ChunkHasher(const ChunkPlan& plan, int64_t rank, int64_t file_bytes,
              int64_t chunk_bytes = kChunkBytes);

  void add(int64_t offset, std::string_view bytes);
  // Returns the checksums of the chunks that were told whole, by chunk.
  const std::map<size_t, uint64_t>& found() const { return found_; }

 private:
  int64_t end_of(int64_t chunk) const;
  void add_to(int64_t chunk, int64_t offset, std::string_view bytes);

  const ChunkPlan& plan_;
  int64_t rank_;
  int64_t file_bytes_;
  int64_t chunk_bytes_;
  Checksum checksum_;
  int64_t next_ = -1;  // the byte that continues `checksum_`
  std::map<size_t, uint64_t> found_;
};

}  // namespace trireme
