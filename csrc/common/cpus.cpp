#include <trireme/common/cpus.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <sched.h>
#include <sstream>
#include <string>
#include <thread>

namespace trireme {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

int64_t cpus_in_affinity_mask() {
  // The kernel refuses a mask smaller than its own, whose size it does not tell: grow until it
  // fits.
  for (int bits = CPU_SETSIZE; bits <= 1 << 20; bits *= 2) {
    std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(bits),
                                                          [](cpu_set_t* set) { CPU_FREE(set); });
    if (mask && sched_getaffinity(0, CPU_ALLOC_SIZE(bits), mask.get()) == 0) {
      return CPU_COUNT_S(CPU_ALLOC_SIZE(bits), mask.get());
    }
  }
  return std::thread::hardware_concurrency();
}

// Reads the quota of v2: one file "<quota or max> <period>".
double quota_v2(const std::filesystem::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0;
  double period = 0;
  return file >> quota >> period && period > 0 ? quota / period : kNoQuota;
}

// Reads the quota of v1: two files; -1 means none.
double quota_v1(const std::filesystem::path& group) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us");
  std::ifstream period_file(group / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  const bool limited = quota_file >> quota && period_file >> period && quota > 0 && period > 0;
  return limited ? quota / period : kNoQuota;
}

// Finds the smallest quota from the group at mount/path up to the mount: a limit on a group holds
// for those below it.
template <typename ReadQuota>
double quota_up_to_mount(const std::filesystem::path& mount, const std::string& path,
                         ReadQuota read_quota) {
  double quota = read_quota(mount);
  std::filesystem::path group = mount;
  for (const std::filesystem::path& part : std::filesystem::path(path).relative_path()) {
    group /= part;
    quota = std::min(quota, read_quota(group));
  }
  return quota;
}

// Finds the quota by the lines of /proc/self/cgroup: "<hierarchy>:<controllers>:<path>", with no
// controllers for v2.
double cgroup_quota(const std::filesystem::path& root) {
  const std::filesystem::path mounts = root / "sys/fs/cgroup";
  std::ifstream membership(root / "proc/self/cgroup");
  double quota = kNoQuota;
  for (std::string line; std::getline(membership, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      quota = std::min(quota, quota_up_to_mount(mounts, path, quota_v2));
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      // It is mounted under the whole list, with a link of the short name where the system makes
      // links.
      if (name != "cpu") continue;
      quota = std::min(quota, quota_up_to_mount(mounts / "cpu", path, quota_v1));
      quota = std::min(quota, quota_up_to_mount(mounts / controllers, path, quota_v1));
    }
  }
  return quota;
}

}  // namespace

int64_t usable_cpus(const std::filesystem::path& root) {
  const auto cpus = static_cast<double>(cpus_in_affinity_mask());
  return std::max<int64_t>(1, static_cast<int64_t>(std::min(cpus, cgroup_quota(root))));
}

}  // namespace trireme
