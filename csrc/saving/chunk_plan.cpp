#include <trireme/saving/chunk_plan.h>

// See [Note: each chunk has a checksum] in chunk_plan.h.

namespace trireme {
namespace {

constexpr int64_t kNobody = -1, kSeveral = -2;

// The bytes of a file from the first to the last one of a box.
struct FileSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

FileSpan span_of(const SafetensorsEntry& entry, const TensorBox& box, int64_t header_bytes) {
  int64_t stride = 1, first = 0, last = 0;
  for (size_t dim = entry.sizes.size(); dim-- > 0;) {
    first += box.first[dim] * stride;
    last += (box.first[dim] + box.sizes[dim] - 1) * stride;
    stride *= entry.sizes[dim];
  }
  const auto bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  const int64_t begin = header_bytes + entry.begin;
  return {begin + first * bytes, begin + (last + 1) * bytes};
}

}  // namespace

std::string ChunkPlan::text() const {
  std::string text;
  for (const Chunk& chunk : chunks)
    text += (text.empty() ? "" : " ") + std::to_string(chunk.rank) + (chunk.is_shared ? "*" : "");
  return text;
}

ChunkPlan plan_chunks(const SafetensorsHeader& header, const WrittenParts& parts, int64_t world,
                      int64_t chunk_bytes) {
  std::vector<int64_t> writers(count_chunks(header.file_bytes, chunk_bytes), kNobody);
  for (const SafetensorsEntry& entry : header.entries) {
    const auto found = parts.find(entry.name);
    if (found == parts.end()) continue;
    for (const WrittenPart& part : found->second) {
      if (part.box.numel() == 0) continue;
      const FileSpan span = span_of(entry, part.box, header.bytes);
      for (int64_t chunk = span.begin / chunk_bytes; chunk * chunk_bytes < span.end; ++chunk) {
        int64_t& writer = writers[static_cast<size_t>(chunk)];
        writer = writer == kNobody || writer == part.rank ? part.rank : kSeveral;
      }
    }
  }
  ChunkPlan plan;
  int64_t shared = 0;
  for (const int64_t writer : writers)
    plan.chunks.push_back(writer >= 0 ? ChunkPlan::Chunk{writer, false}
                                      : ChunkPlan::Chunk{shared++ % world, true});
  return plan;
}

}  // namespace trireme
