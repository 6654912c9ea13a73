#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/segment.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace trireme::shm {

// A segment that another process maps: a copy of its content.
struct FoundSegment {
  SegmentHeader header{};
  std::vector<std::byte> bytes;  // behind the header
  std::vector<pid_t> holders;    // processes that map it, ascending
};

// A process that this one may not look at.
struct HiddenProcess {
  pid_t pid;
  std::string why;  // "Permission denied"
};

struct SegmentScan {
  std::vector<FoundSegment> segments;
  std::vector<HiddenProcess> hidden;  // mappings cannot be listed
  // Processes that map segments of that length whose memory cannot be read.
  std::vector<HiddenProcess> sealed;
};

enum class ReadThrough : uint8_t {
  kMemory,      // /proc/<pid>/mem, or the files below where that is forbidden
  kFilesAlone,  // /proc/<pid>/fd, which needs fewer rights, but only the maker of a segment has it
};

// Finds all segments of `bytes` that processes of this machine map, read without their help: they
// may be stopped, stuck or in the middle of a write. Changes nothing. Cost: one pass over
// /proc/*/maps.
TRIREME_API SegmentScan scan_segments(int64_t bytes, ReadThrough way = ReadThrough::kMemory);

// One line of /proc/<pid>/maps, if it may be the whole of a segment with that many bytes.
struct Mapping {
  uint64_t begin = 0;
  uint64_t device = 0;
  uint64_t inode = 0;
};
TRIREME_API bool parse_mapping(std::string_view line, int64_t bytes, Mapping& mapping);

// Returns the number by which a process knows itself, inside its pid namespace; 0 if it is gone.
TRIREME_API pid_t own_number_of(pid_t pid);

}  // namespace trireme::shm
