#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/safetensors_file.h>
#include <trireme/saving/tensor_box.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// [Note: each chunk has a checksum]
//
// A file of tensors is a row of chunks of kChunkBytes, the last one shorter; the header counts as
// bytes like all others. Who writes all tensors' bytes of a chunk hashes them on their way. A chunk
// that several ranks write is hashed from the file, by one of them, when all have written. To load,
// the ranks share the chunks, and each is read and hashed by one.

constexpr int64_t kChunkBytes = int64_t{4} << 20;

// The checksums of the chunks of files, by file name.
using ChunkChecksums = std::map<std::string, std::vector<uint64_t>>;

// Returns how many chunks a file has.
constexpr size_t count_chunks(int64_t file_bytes, int64_t chunk_bytes) {
  return static_cast<size_t>((file_bytes + chunk_bytes - 1) / chunk_bytes);
}

// The part of a tensor that one rank writes.
struct WrittenPart {
  int64_t rank = 0;
  TensorBox box;
};
// The parts of tensors, by name: each element is in one.
using WrittenParts = std::map<std::string, std::vector<WrittenPart>>;

// Who hashes the chunks of a file that is saved. It is a value: equal on all ranks.
struct ChunkPlan {
  struct Chunk {
    int64_t rank = 0;        // who hashes it
    bool is_shared = false;  // several ranks write it, or none: it is hashed from the file

    bool operator==(const Chunk&) const = default;
  };
  std::vector<Chunk> chunks;

  // Returns one word per chunk, "0 0 0* 1": who hashes it, with a star from the file.
  TRIREME_API std::string text() const;
};

TRIREME_API ChunkPlan plan_chunks(const SafetensorsHeader& header, const WrittenParts& parts,
                                  int64_t world, int64_t chunk_bytes = kChunkBytes);

}  // namespace trireme
