#include <trireme/shm/segment_scan.h>

#include <trireme/shm/liveness.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <utility>

namespace trireme::shm {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

std::optional<pid_t> number_in(std::string_view text) {
  pid_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size();
  return whole && number > 0 ? std::optional(number) : std::nullopt;
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (fs::directory_iterator it("/proc", ignored), end; it != end; it.increment(ignored)) {
    if (ignored) break;
    if (const auto pid = number_in(it->path().filename().native())) found.push_back(*pid);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Fills `to` from the file. Returns false, with the reason in `error`, if not all can be read.
bool read_file(const std::string& path, uint64_t offset, Bytes& to, int& error) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) {
    error = errno;
    return false;
  }
  size_t filled = 0;
  while (filled < to.size()) {
    const ssize_t got =
        ::pread(fd, to.data() + filled, to.size() - filled, static_cast<off_t>(offset + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      error = got < 0 ? errno : EIO;
      break;
    }
    filled += static_cast<size_t>(got);
  }
  ::close(fd);
  return filled == to.size();
}

// Reads by the descriptor that the maker of a segment keeps. Only a regular file is ever opened:
// others may react to it.
bool read_descriptor(pid_t pid, const Mapping& mapping, Bytes& to, int& error) {
  std::error_code ignored;
  fs::directory_iterator it(folder_of(pid) + "/fd", ignored);
  for (const fs::directory_iterator end; !ignored && it != end; it.increment(ignored)) {
    struct stat status{};
    const std::string path = it->path().native();
    if (::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
        status.st_ino == mapping.inode && status.st_dev == mapping.device)
      return read_file(path, 0, to, error);
  }
  return false;
}

// Returns nothing if it is none of ours, or its maker is at its first lines.
std::optional<FoundSegment> segment_in(const Bytes& mapped, int64_t bytes) {
  FoundSegment found;
  std::memcpy(&found.header, mapped.data(), sizeof(found.header));
  if (found.header.magic != SegmentHeader::kMagic || found.header.bytes != bytes)
    return std::nullopt;
  found.bytes.assign(mapped.begin() + Segment::kHeaderBytes, mapped.end());
  return found;
}

template <typename Number>
bool take_number(std::string_view& text, Number& number, int radix, char until) {
  const size_t end = text.find(until);
  if (end == std::string_view::npos) return false;
  const auto result = std::from_chars(text.data(), text.data() + end, number, radix);
  if (result.ec != std::errc() || result.ptr != text.data() + end) return false;
  text.remove_prefix(end + 1);
  return true;
}

// A mapping that several processes may have, and the data read of it.
struct Candidate {
  std::vector<std::pair<pid_t, Mapping>> holders;
};

}  // namespace

bool parse_mapping(std::string_view line, int64_t bytes, Mapping& mapping) {
  const std::string anonymous = std::string("/memfd:") + kMemoryName + " (deleted)";
  const size_t name = line.find('/');
  if (name == std::string_view::npos) return false;
  const std::string_view path = line.substr(name);
  if (path != anonymous && !path.starts_with("/dev/shm/trireme-")) return false;
  uint64_t end = 0;
  uint64_t offset = 0;
  unsigned device_major = 0;
  unsigned device_minor = 0;
  if (!take_number(line, mapping.begin, 16, '-') || !take_number(line, end, 16, ' ')) return false;
  const size_t rights = line.find(' ');
  if (rights == std::string_view::npos) return false;
  line.remove_prefix(rights + 1);
  if (!take_number(line, offset, 16, ' ') || !take_number(line, device_major, 16, ':') ||
      !take_number(line, device_minor, 16, ' ') || !take_number(line, mapping.inode, 10, ' '))
    return false;
  mapping.device = ::makedev(device_major, device_minor);
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t needed = static_cast<uint64_t>(bytes + Segment::kHeaderBytes);
  return offset == 0 && end - mapping.begin == (needed + page - 1) / page * page;
}

pid_t own_number_of(pid_t pid) {
  std::ifstream status(folder_of(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream numbers(line.substr(6));
    pid_t number = 0;
    while (numbers >> number) {
    }
    return number;
  }
  return 0;
}

namespace {

// Returns whether a process still maps it: one that ends gives its memory up before it is seen as
// dead.
bool still_maps(pid_t pid, int64_t bytes, const Mapping& mapping) {
  std::ifstream maps(folder_of(pid) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    Mapping other;
    if (parse_mapping(line, bytes, other) && other.device == mapping.device &&
        other.inode == mapping.inode)
      return true;
  }
  return false;
}

}  // namespace

SegmentScan scan_segments(int64_t bytes, ReadThrough way) {
  SegmentScan scan;
  std::map<std::pair<uint64_t, uint64_t>, Candidate> candidates;
  for (const pid_t pid : all_processes()) {
    std::ifstream maps(folder_of(pid) + "/maps");
    if (!maps && (errno == EACCES || errno == EPERM))
      scan.hidden.push_back({pid, std::strerror(errno)});
    for (std::string line; std::getline(maps, line);) {
      Mapping mapping;
      if (!parse_mapping(line, bytes, mapping)) continue;
      auto& holders = candidates[{mapping.device, mapping.inode}].holders;
      if (holders.empty() || holders.back().first != pid) holders.emplace_back(pid, mapping);
    }
  }
  for (const auto& [key, candidate] : candidates) {
    int error = 0;
    bool read = false;
    Bytes mapped(static_cast<size_t>(bytes + Segment::kHeaderBytes));
    for (const auto& [pid, mapping] : candidate.holders) {
      read = (way == ReadThrough::kMemory &&
              read_file(folder_of(pid) + "/mem", mapping.begin, mapped, error)) ||
             read_descriptor(pid, mapping, mapped, error);
      if (read) break;
    }
    if (!read) {
      // A process that has unmapped it since mappings were listed is no rank that hides.
      const auto holder = std::find_if(
          candidate.holders.begin(), candidate.holders.end(),
          [bytes](const auto& entry) { return still_maps(entry.first, bytes, entry.second); });
      if (holder != candidate.holders.end())
        scan.sealed.push_back({holder->first, std::strerror(error != 0 ? error : EACCES)});
      continue;
    }
    auto segment = segment_in(mapped, bytes);
    if (!segment) continue;
    for (const auto& [pid, mapping] : candidate.holders) segment->holders.push_back(pid);
    scan.segments.push_back(std::move(*segment));
  }
  return scan;
}

}  // namespace trireme::shm
