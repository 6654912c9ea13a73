#include <trireme/shm/liveness.h>

#include <trireme/common/error.h>
#include <trireme/shm/fault.h>

#include <array>
#include <fstream>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace trireme::shm {
namespace {

// Returns a field of /proc/<pid>/stat behind the name, which may hold spaces: state is the first,
// the start time the twentieth. Returns nothing if there is no such process.
std::string stat_field(pid_t pid, int number) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string whole = text.str();
  const size_t name_end = whole.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(whole.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < number; ++i) fields >> field;
  return field;
}

constexpr int kState = 1;
constexpr int kStartTime = 20;

}  // namespace

PeerProcess::PeerProcess(pid_t pid) : pid_(pid) {
  if (pid == ::getpid()) return;
  fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd_ < 0) started_at_ = stat_field(pid, kStartTime);
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
  return *this;
}

PeerProcess::~PeerProcess() {
  if (fd_ >= 0) ::close(fd_);
}

bool PeerProcess::alive() const {
  if (fd_ >= 0) {
    pollfd watch{fd_, POLLIN, 0};
    // Less than 0 where a signal of this process came between, say: that tells nothing of the peer.
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

bool has_ended(pid_t pid) {
  const std::string letter = stat_field(pid, kState);
  return letter.empty() || letter == "Z" || letter == "X";
}

std::string pid_namespace() {
  std::array<char, 64> target{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<size_t>(length)) : "unknown";
}

}  // namespace trireme::shm
