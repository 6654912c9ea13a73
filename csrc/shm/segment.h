#pragma once

#include <trireme/common/export.h>
#include <trireme/common/forks.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>

namespace trireme::shm {

// 128 random bits at the start of a segment: a process that reads them there shares memory with its
// maker.
using Nonce = std::array<uint64_t, 2>;
TRIREME_API Nonce random_nonce();

enum class SegmentKind : uint8_t {
  kAnonymous,  // memfd; peers open /proc/<pid>/fd/<fd>, which takes the rights of a debugger
  kNamed       // shm_open of a random name, until unlink_name()
};

constexpr const char* kMemoryName = "trireme";  // name of a memfd, as /proc/<pid>/maps shows it

// The beginning of every segment.
struct SegmentHeader {
  static constexpr uint64_t kMagic = 0x31656d6572697274;  // "trireme1"

  uint64_t magic;
  Nonce nonce;
  int64_t bytes;  // behind the header
};

// Where a peer finds a segment.
struct TRIREME_API SegmentAddress {
  SegmentKind kind = SegmentKind::kAnonymous;
  pid_t pid = 0;
  int fd = -1;  // kAnonymous
  int64_t bytes = 0;
  Nonce nonce{};

  std::string name() const;  // kNamed: "/trireme-<nonce>"
  std::string to_string() const;
  // Returns nothing if the text was not made by to_string().
  static std::optional<SegmentAddress> parse(std::string_view text);

  bool operator==(const SegmentAddress&) const = default;
};

// Memory that several processes map. Its pages are reserved before they are touched, so that this
// cannot fail later (for create_growing(), by the process that touches them), and its size is
// sealed. It does not outlive the last process that maps it, however that ends (a named one: once
// unlink_name() was called). Move-only; not thread-safe.
class TRIREME_API Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Makes `bytes` zeros behind the header. Pages lie on the NUMA node of the thread that reserves
  // them: the calling one, or, in a segment of several `parts`, that one for the first part and
  // callers of reserve() for the others. Throws Fault(kMemory) with the number of free bytes.
  static Segment create(SegmentKind kind, int64_t bytes, int64_t parts = 1);

  // Makes a segment without reserving pages but for the header: addresses only, of which more than
  // the machine has memory may be asked for. A process must reserve a part by grow() before it
  // writes there, which may be done at any time, in any process.
  static Segment create_growing(SegmentKind kind, int64_t bytes);

  // Opens a peer's segment. Returns an empty one, with the reason in `why_not`, if it cannot be
  // opened or does not match the address. `keeps_file` takes one file descriptor, for
  // private_in_children().
  static Segment open(const SegmentAddress& address, std::string& why_not, bool keeps_file = false);

  // Reserves one of the equal parts of the pages. No process touches the segment until all of them
  // are reserved. Returns false, with the reason in `why_not`, if there is no memory.
  bool reserve(int64_t part, int64_t parts, std::string& why_not) const;

  // Reserves the pages of [begin, end) of data(), on the NUMA node of the calling thread; reserved
  // pages stay as they are. Returns false, with the reason in `why_not`, if there is no memory.
  // Needs the file: of a segment made here, or opened with `keeps_file`.
  bool grow(int64_t begin, int64_t end, std::string& why_not) const;

  explicit operator bool() const { return map_ != nullptr; }
  const SegmentAddress& address() const { return address_; }
  // Returns the address by this process's file, of a segment made here or opened with `keeps_file`,
  // also when its maker has ended; nothing for a named one.
  std::optional<SegmentAddress> address_here() const;
  // Returns memory aligned to 64 bytes.
  std::byte* data() const { return static_cast<std::byte*>(map_) + kHeaderBytes; }
  int64_t bytes() const { return address_.bytes; }

  // Gives forked children copies of their own to write to while the result lives, which may be no
  // longer than this. Null for a peer's segment that was opened without its file.
  std::unique_ptr<PrivateInChildren> private_in_children() const;

  // Removes the name, once every peer has opened the segment. The mapping stays.
  void unlink_name();

  static constexpr int64_t kHeaderBytes = 64;
  static_assert(sizeof(SegmentHeader) <= kHeaderBytes);

 private:
  static Segment make(SegmentKind kind, int64_t bytes, int64_t reserved_bytes, int64_t parts);
  void map(int fd, int64_t mapped_bytes);
  void release() noexcept;

  SegmentAddress address_;
  void* map_ = nullptr;
  bool owns_name_ = false;
  // The maker has it: peers and the doctor open it through /proc. A peer has it if it keeps it.
  int fd_ = -1;
};

// Returns the bytes that this process's memory control group and the machine would still give.
TRIREME_API int64_t free_memory_bytes();

}  // namespace trireme::shm
