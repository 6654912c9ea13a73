#include <trireme/shm/liveness.h>

#include <trireme/common/error.h>
#include <trireme/shm/fault.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <linux/ioctl.h>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace trireme::shm {
namespace {

// Returns the fields of /proc/<pid>/stat behind the name, which may hold spaces: state is the
// first, the start time the twentieth. Returns none if there is no such process.
std::vector<std::string> stat_fields(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string whole = text.str();
  const size_t name_end = whole.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(whole.substr(name_end + 1));
  return {std::istream_iterator<std::string>(fields), {}};
}

std::string field_of(const std::vector<std::string>& fields, size_t number) {
  return number <= fields.size() ? fields[number - 1] : std::string();
}

std::string stat_field(pid_t pid, size_t number) { return field_of(stat_fields(pid), number); }

// Returns whether the kernel lets us read that process. To others it reports the exit code as 0. It
// opens this file to the same readers.
bool may_look_into(pid_t pid) {
  return std::ifstream("/proc/" + std::to_string(pid) + "/io").get() != EOF;
}

constexpr size_t kState = 1;
constexpr size_t kStartTime = 20;
constexpr size_t kExitCode = 50;

// The first version of struct pidfd_info, which headers have from Linux 6.13 on.
struct PidfdInfo {
  uint64_t mask = kExit;
  uint64_t cgroup = 0;
  std::array<uint32_t, 11> ids{};
  int32_t exit_code = 0;

  static constexpr uint64_t kExit = 8;  // from Linux 6.15 on
};
constexpr auto kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

}  // namespace

PeerProcess::PeerProcess(pid_t pid) : pid_(pid) {
  if (pid == ::getpid()) return;
  fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  started_at_ = stat_field(pid, kStartTime);
  if (fd_ < 0 && started_at_.empty()) {
    throw Fault(FaultKind::kNotPossible,
                error_text("liveness", "cannot watch process " + std::to_string(pid), {},
                           "Run the ranks of a host in one pid namespace."));
  }
}

PeerProcess::PeerProcess(PeerProcess&& other) noexcept { *this = std::move(other); }

PeerProcess& PeerProcess::operator=(PeerProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(fd_, other.fd_);
  std::swap(started_at_, other.started_at_);
  other.wait_status_ = wait_status_.exchange(other.wait_status_);
  return *this;
}

PeerProcess::~PeerProcess() {
  if (fd_ >= 0) ::close(fd_);
}

bool PeerProcess::alive() const {
  if (fd_ >= 0) {
    pollfd watch{fd_, POLLIN, 0};
    // Less than 0 if a signal of this process interrupted it, say: that tells nothing of the peer.
    return ::poll(&watch, 1, 0) <= 0;
  }
  return started_at_.empty() || stat_field(pid_, kStartTime) == started_at_;
}

std::string PeerProcess::state() const {
  if (!alive()) return "gone";
  const std::string letter = stat_field(pid_, kState);
  if (letter == "T" || letter == "t") return "stopped";
  if (letter == "Z" || letter == "X" || (letter.empty() && !alive())) return "gone";
  if (letter == "D") return "waiting for a device";
  return letter == "S" ? "sleeping" : "running";
}

std::optional<int> PeerProcess::wait_status() const {
  if (pid_ == ::getpid() || alive()) return std::nullopt;
  int status = wait_status_;
  if (status == kUnknown && !started_at_.empty()) {
    const std::vector<std::string> fields = stat_fields(pid_);
    const std::string code = field_of(fields, kExitCode);
    if (field_of(fields, kStartTime) == started_at_ && !code.empty() &&
        (code != "0" || may_look_into(pid_)))
      status = std::atoi(code.c_str());
  }
  // /proc tells it until the parent has reaped the process, and the pidfd after that. In this order
  // one of them does, though the process is reaped in between.
  if (PidfdInfo info; status == kUnknown && fd_ >= 0 && ::ioctl(fd_, kPidfdGetInfo, &info) == 0 &&
                      (info.mask & PidfdInfo::kExit) != 0)
    status = info.exit_code;
  if (status == kUnknown) return std::nullopt;
  wait_status_ = status;
  return status;
}

std::optional<int64_t> out_of_memory_kills() {
  std::ifstream file("/proc/vmstat");
  std::string name;
  for (int64_t count = 0; file >> name >> count;)
    if (name == "oom_kill") return count;
  return std::nullopt;
}

namespace {

// glibc before 2.32 has no sigabbrev_np().
std::string name_of_signal(int number) {
  switch (number) {
    case SIGKILL:
      return "SIGKILL";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGABRT:
      return "SIGABRT";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    case SIGHUP:
      return "SIGHUP";
    default:
      return "signal " + std::to_string(number);
  }
}

}  // namespace

std::string text_of_end(std::optional<int> wait_status, std::optional<int64_t> kills_before) {
  if (!wait_status) return {};
  if (!WIFSIGNALED(*wait_status))
    return ": it ended with exit code " + std::to_string(WEXITSTATUS(*wait_status));
  const std::string text = ": it was killed by " + name_of_signal(WTERMSIG(*wait_status));
  if (!is_sigkill(*wait_status)) return text;
  const auto kills = out_of_memory_kills();
  if (!kills || !kills_before) return text + " (out of memory? see dmesg)";
  if (*kills == *kills_before)
    return text + " (not by the kernel for want of memory: somebody sent the signal)";
  return text + " (out of memory? meanwhile the kernel has killed " +
         std::to_string(*kills - *kills_before) + " for want of it on this machine)";
}

std::string start_of(pid_t pid) { return stat_field(pid, kStartTime); }

std::string host_boot() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.empty() ? "unknown" : id;
}

std::string pid_namespace() {
  std::array<char, 64> target{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<size_t>(length)) : "unknown";
}

}  // namespace trireme::shm
