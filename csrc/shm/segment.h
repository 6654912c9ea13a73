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

// Holds 128 random bits at the start of a segment: who reads them there shares memory with its
// maker.
using Nonce = std::array<uint64_t, 2>;
TRIREME_API Nonce random_nonce();

enum class SegmentKind : uint8_t {
  kAnonymous,  // memfd; peers open /proc/<pid>/fd/<fd>, which takes the rights of a debugger
  kNamed       // shm_open of a random name, until unlink_name()
};

constexpr const char* kMemoryName = "trireme";  // name of a memfd, as /proc/<pid>/maps shows it

// Is what every segment begins with.
struct SegmentHeader {
  static constexpr uint64_t kMagic = 0x31656d6572697274;  // "trireme1"

  uint64_t magic;
  Nonce nonce;
  int64_t bytes;  // behind the header
};

// Says where a peer finds a segment.
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

// Is memory that several processes map. Its pages are reserved before anybody touches them, so that
// this cannot fail later (by who touches them, for create_growing()), and its size is sealed.
// Nothing of it outlives the last process that maps it, however that ends (a named one: once
// unlink_name() was called). Move-only; not thread-safe.
class TRIREME_API Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Makes at least `bytes` zeros after the nonce. Pages lie on the NUMA node of who reserves them:
  // the calling thread, or, of a segment in several `parts`, for the first one it and for the
  // others whoever calls reserve(). Throws Fault(kMemory) saying how much is free.
  static Segment create(SegmentKind kind, int64_t bytes, int64_t parts = 1);

  // Makes the same without reserving pages but for the header: addresses only, of which more than
  // the machine has memory may be asked for. Whoever writes a part of it first reserves that by
  // grow(), which may be done at any time, in any process.
  static Segment create_growing(SegmentKind kind, int64_t bytes);

  // Opens a peer's. Returns an empty one, with the reason in `why_not`, if it cannot be opened or
  // is not what the address says. Who `keeps_file` takes one file descriptor, for
  // private_in_children().
  static Segment open(const SegmentAddress& address, std::string& why_not, bool keeps_file = false);

  // Reserves one of the equal parts of the pages. Nobody touches the segment until all of them are
  // reserved. Returns false, with the reason in `why_not`, if there is no memory.
  bool reserve(int64_t part, int64_t parts, std::string& why_not) const;

  // Reserves the pages of [begin, end) of data(), on the NUMA node of the calling thread; those
  // that are reserved stay as they are. Returns false, with the reason in `why_not`, if there is no
  // memory. Needs the file: of who made it, or opened it with `keeps_file`.
  bool grow(int64_t begin, int64_t end, std::string& why_not) const;

  explicit operator bool() const { return map_ != nullptr; }
  const SegmentAddress& address() const { return address_; }
  // Returns where others find it by the file of this process, who made it or opened it with
  // `keeps_file`, also when its maker has ended; nothing for a named one.
  std::optional<SegmentAddress> address_here() const;
  // Returns memory aligned to 64 bytes.
  std::byte* data() const { return static_cast<std::byte*>(map_) + kHeaderBytes; }
  int64_t bytes() const { return address_.bytes; }

  // While the result lives, which may be no longer than this, forked children write copies of their
  // own. Null for a peer's that was opened without its file.
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

// Returns the bytes that the memory control group of this process and the machine would still give.
TRIREME_API int64_t free_memory_bytes();

}  // namespace trireme::shm
