#include <trireme/comm/place_text.h>

#include <trireme/shm/liveness.h>

#include <array>
#include <unistd.h>

namespace trireme {
namespace {

std::string network_namespace() {
  std::array<char, 64> name{};
  const ssize_t size = ::readlink("/proc/self/ns/net", name.data(), name.size());
  return size < 0 ? "" : std::string(name.data(), static_cast<size_t>(size));
}

}  // namespace

std::string place_text() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return shm::host_boot() + " " + name.data() + " " + network_namespace();
}

}  // namespace trireme
