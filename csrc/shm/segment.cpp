#include <trireme/shm/segment.h>

#include <trireme/common/error.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/flag_wait.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace trireme::shm {
namespace {

// A file descriptor that is closed with this object.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() { reset(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }
  int take_descriptor() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

std::string text_of(int error) { return std::strerror(error); }

Fault no_memory(int64_t bytes, int error) {
  const int64_t free = free_memory_bytes();
  // The kernel returns this error also if a process has too many maps.
  const bool has_memory = error == ENOMEM && free >= bytes;
  return {
      FaultKind::kMemory,
      error_text("segment",
                 "got no memory to share (" + text_of(error) + "): needs " + std::to_string(bytes) +
                     " bytes, free are " + std::to_string(free),
                 {},
                 has_memory ? "Raise vm.max_map_count, or keep fewer tensors of other ranks."
                            : "Raise the container's memory limit or the size of /dev/shm, or use "
                              "fewer groups.")};
}

bool is_out_of_files(int error) { return error == EMFILE || error == ENFILE; }

// Returns "Too many open files: the limit of this process is 1024".
std::string text_of_files(int error) {
  rlimit files{};
  if (error != EMFILE || ::getrlimit(RLIMIT_NOFILE, &files) != 0) return text_of(error);
  return text_of(error) + ": the limit of this process is " + std::to_string(files.rlim_cur);
}

Fault no_files(int error) {
  return {
      FaultKind::kMemory,
      error_text("segment", "got no file for memory to share (" + text_of_files(error) + ")", {},
                 error == EMFILE ? "Raise the limit (ulimit -n), or close files."
                                 : "Raise fs.file-max of this machine, or close files.")};
}

std::string path_of(const SegmentAddress& address) {
  return address.kind == SegmentKind::kAnonymous
             ? "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd)
             : address.name();
}

int open_peers(const SegmentAddress& address) {
  const std::string path = path_of(address);
  return address.kind == SegmentKind::kAnonymous
             ? ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
             : ::shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0);
}

// One open file in reserve, so that a process which has as many as it may can still map the memory
// of a peer: that takes a file for a moment only.
class SpareFile {
 public:
  static SpareFile& of_process() {
    static auto* spare = new SpareFile;  // threads may outlive static objects
    return *spare;
  }
  // Keeps other threads of ours from keeping a file in the place of the spare one.
  std::unique_lock<std::mutex> lock() {
    std::unique_lock held(mutex_);
    refill();
    return held;
  }

  // A file opened for a peer's segment: in the place of the spare one, if there was no other.
  class Use {
   public:
    // Calls `open`, which returns a descriptor and sets errno, with one file more if it needs it.
    // Another thread may take the place of that first, say to read a file of /proc. It gives it
    // back soon, so this waits for a second at most.
    template <typename Open>
    explicit Use(const Open& open) : lock_(of_process().lock()) {
      int& spare = of_process().fd_;
      const Clock::time_point until = Clock::now() + kPatience;
      int error = 0;
      for (;;) {
        const int fd = open();
        error = errno;
        file_.reset(fd);
        if (fd >= 0 || !is_out_of_files(error) || Clock::now() >= until) break;
        if (spare >= 0) {
          ::close(std::exchange(spare, -1));
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      if (file_.get() >= 0 && spare >= 0) lock_.unlock();
      errno = error;
    }
    ~Use() {
      file_.reset();
      if (!lock_.owns_lock()) return;
      const int error = errno;
      of_process().refill();
      errno = error;
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    File& file() { return file_; }

   private:
    std::unique_lock<std::mutex> lock_;  // held until the spare file is there again
    File file_{-1};
  };

 private:
  static constexpr std::chrono::seconds kPatience{1};

  SpareFile() { refill(); }
  void refill() {
    if (fd_ < 0) fd_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  }

  std::mutex mutex_;
  int fd_ = -1;
};

// Returns an errno.
int reserve_range(int fd, int64_t begin, int64_t length) {
  if (length == 0) return 0;
  int error = 0;
  do {
    error = ::posix_fallocate(fd, begin, length);
  } while (error == EINTR);
  return error;
}

int reserve_part(int fd, int64_t mapped_bytes, int64_t part, int64_t parts) {
  const int64_t share = mapped_bytes / parts;
  const int64_t length = part + 1 == parts ? mapped_bytes - part * share : share;
  return reserve_range(fd, part * share, length);
}

std::string hex(uint64_t value) {
  std::array<char, 16> digits;
  digits.fill('0');
  std::array<char, 16> found{};
  const auto end = std::to_chars(found.begin(), found.end(), value, 16).ptr;
  std::copy(found.data(), end, digits.data() + (16 - (end - found.data())));
  return {digits.begin(), digits.end()};
}

// Takes one space-separated number off the front of `text`.
template <typename Number>
bool take_number(std::string_view& text, Number& number, int radix = 10) {
  const size_t end = std::min(text.find(' '), text.size());
  const auto result = std::from_chars(text.data(), text.data() + end, number, radix);
  if (result.ec != std::errc() || result.ptr != text.data() + end) return false;
  text.remove_prefix(std::min(end + 1, text.size()));
  return true;
}

int64_t read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  int64_t number = -1;
  return file >> number ? number : -1;
}

// Returns the bytes that the control groups (v2) above this process leave.
int64_t free_in_control_group() {
  std::ifstream membership("/proc/self/cgroup");
  int64_t found = std::numeric_limits<int64_t>::max();
  for (std::string line; std::getline(membership, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    const std::filesystem::path root = "/sys/fs/cgroup";
    std::filesystem::path group = root / std::filesystem::path(line.substr(3)).relative_path();
    for (;; group = group.parent_path()) {
      const int64_t limit = read_number(group / "memory.max");
      const int64_t used = read_number(group / "memory.current");
      if (limit >= 0 && used >= 0) found = std::min(found, std::max<int64_t>(limit - used, 0));
      if (group == root || !group.has_relative_path()) break;
    }
  }
  return found;
}

}  // namespace

int64_t free_memory_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  int64_t available = std::numeric_limits<int64_t>::max();
  for (std::string word; meminfo >> word;) {
    if (word != "MemAvailable:") continue;
    int64_t kib = 0;
    if (meminfo >> kib) available = kib * 1024;
    break;
  }
  return std::min(available, free_in_control_group());
}

Nonce random_nonce() {
  Nonce nonce{};
  auto* bytes = reinterpret_cast<std::byte*>(nonce.data());
  for (size_t filled = 0; filled < sizeof(nonce);) {
    const ssize_t got = ::getrandom(bytes + filled, sizeof(nonce) - filled, 0);
    if (got > 0) filled += static_cast<size_t>(got);
  }
  return nonce;
}

std::string SegmentAddress::name() const { return "/trireme-" + hex(nonce[0]) + hex(nonce[1]); }

std::string SegmentAddress::to_string() const {
  std::ostringstream text;
  text << static_cast<int>(kind) << ' ' << pid << ' ' << fd << ' ' << bytes << ' ' << hex(nonce[0])
       << ' ' << hex(nonce[1]);
  return text.str();
}

std::optional<SegmentAddress> SegmentAddress::parse(std::string_view text) {
  SegmentAddress address;
  uint8_t kind = 0;
  const bool read = take_number(text, kind) && take_number(text, address.pid) &&
                    take_number(text, address.fd) && take_number(text, address.bytes) &&
                    take_number(text, address.nonce[0], 16) &&
                    take_number(text, address.nonce[1], 16) && text.empty();
  constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max() - Segment::kHeaderBytes;
  if (!read || kind > 1 || address.pid <= 0 || address.bytes <= 0 || address.bytes > kMostBytes)
    return std::nullopt;
  address.kind = static_cast<SegmentKind>(kind);
  return address;
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this == &other) return *this;
  release();
  address_ = other.address_;
  map_ = std::exchange(other.map_, nullptr);
  owns_name_ = std::exchange(other.owns_name_, false);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

Segment::~Segment() { release(); }

void Segment::release() noexcept {
  unlink_name();
  if (map_ != nullptr) ::munmap(map_, static_cast<size_t>(address_.bytes + kHeaderBytes));
  map_ = nullptr;
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Segment::unlink_name() {
  if (std::exchange(owns_name_, false)) ::shm_unlink(address_.name().c_str());
}

void Segment::map(int fd, int64_t mapped_bytes) {
  void* found =
      ::mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  map_ = found == MAP_FAILED ? nullptr : found;
}

Segment Segment::create(SegmentKind kind, int64_t bytes, int64_t parts) {
  return make(kind, bytes, bytes + kHeaderBytes, parts);
}

Segment Segment::create_growing(SegmentKind kind, int64_t bytes) {
  return make(kind, bytes, kHeaderBytes, 1);
}

Segment Segment::make(SegmentKind kind, int64_t bytes, int64_t reserved_bytes, int64_t parts) {
  const int64_t mapped_bytes = bytes + kHeaderBytes;
  // Checked first: if a control group is full, the kernel would end a process of it instead of
  // failing the call.
  if (free_memory_bytes() < reserved_bytes) throw no_memory(reserved_bytes, ENOMEM);

  Segment segment;
  segment.address_ = {kind, ::getpid(), -1, bytes, random_nonce()};
  const bool anonymous = kind == SegmentKind::kAnonymous;
  File file([&] {
    const auto lock = SpareFile::of_process().lock();
    return anonymous ? ::memfd_create(kMemoryName, MFD_CLOEXEC | MFD_ALLOW_SEALING)
                     : ::shm_open(segment.address_.name().c_str(),
                                  O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  }());
  if (file.get() < 0) {
    if (is_out_of_files(errno)) throw no_files(errno);
    throw Fault(FaultKind::kNotPossible,
                error_text("segment", "got no shared memory object: " + text_of(errno), {},
                           "Allow memfd_create, or mount /dev/shm."));
  }
  segment.owns_name_ = !anonymous;
  if (::ftruncate(file.get(), mapped_bytes) != 0) throw no_memory(mapped_bytes, errno);
  if (const int error = reserve_part(file.get(), reserved_bytes, 0, parts); error != 0)
    throw no_memory(reserved_bytes, error);
  if (anonymous) {
    ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  }
  segment.map(file.get(), mapped_bytes);
  if (!segment) throw no_memory(mapped_bytes, errno);
  const SegmentHeader header{SegmentHeader::kMagic, segment.address_.nonce, bytes};
  std::memcpy(segment.map_, &header, sizeof(header));
  segment.fd_ = file.take_descriptor();
  if (anonymous) segment.address_.fd = segment.fd_;
  return segment;
}

Segment Segment::open(const SegmentAddress& address, std::string& why_not, bool keeps_file) {
  const std::string path = path_of(address);
  SpareFile::Use use([&] { return open_peers(address); });
  File& file = use.file();
  if (file.get() < 0) {
    why_not = "cannot open " + path + ": " + text_of_files(errno);
    return {};
  }
  struct stat found{};
  const int64_t mapped_bytes = address.bytes + kHeaderBytes;
  if (::fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode) ||
      found.st_size != mapped_bytes) {
    why_not = path + " is not the segment of a peer";
    return {};
  }
  Segment segment;
  segment.address_ = address;
  segment.map(file.get(), mapped_bytes);
  if (!segment) {
    const int error = errno;
    why_not = "cannot map " + std::to_string(mapped_bytes) + " bytes of " + path + ": " +
              text_of(error) + "; free are " + std::to_string(free_memory_bytes());
    return {};
  }
  SegmentHeader header{};
  std::memcpy(&header, segment.map_, sizeof(header));
  if (header.magic != SegmentHeader::kMagic || header.nonce != address.nonce ||
      header.bytes != address.bytes) {
    why_not = path + " is another segment than its address says";
    return {};
  }
  if (keeps_file) segment.fd_ = file.take_descriptor();
  return segment;
}

std::unique_ptr<PrivateInChildren> Segment::private_in_children() const {
  if (map_ == nullptr || fd_ < 0) return nullptr;
  return std::make_unique<PrivateInChildren>(
      map_, static_cast<size_t>(address_.bytes + kHeaderBytes), fd_);
}

std::optional<SegmentAddress> Segment::address_here() const {
  if (address_.kind == SegmentKind::kNamed || fd_ < 0) return std::nullopt;
  SegmentAddress here = address_;
  here.pid = ::getpid();
  here.fd = fd_;
  return here;
}

bool Segment::grow(int64_t begin, int64_t end, std::string& why_not) const {
  const int64_t bytes = end - begin;
  const bool is_there = free_memory_bytes() >= bytes;  // see make()
  const int error = fd_ < 0    ? EBADF
                    : is_there ? reserve_range(fd_, kHeaderBytes + begin, bytes)
                               : ENOMEM;
  if (error == 0) return true;
  why_not = "cannot reserve " + std::to_string(bytes) + " bytes more: " + text_of(error) +
            "; free are " + std::to_string(free_memory_bytes());
  return false;
}

bool Segment::reserve(int64_t part, int64_t parts, std::string& why_not) const {
  const File file(open_peers(address_));
  const int error =
      file.get() < 0 ? errno : reserve_part(file.get(), address_.bytes + kHeaderBytes, part, parts);
  if (error == 0) return true;
  why_not = "cannot reserve part " + std::to_string(part) + " of " + std::to_string(parts) +
            " of " + std::to_string(address_.bytes) + " bytes of " + path_of(address_) + ": " +
            text_of(error) + "; free are " + std::to_string(free_memory_bytes());
  return false;
}

}  // namespace trireme::shm
