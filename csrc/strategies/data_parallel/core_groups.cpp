#include <trireme/strategies/data_parallel/core_groups.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sched.h>
#include <set>
#include <string>

namespace trireme {
namespace {

std::vector<int> cpus_of_affinity_mask() {
  // The kernel refuses a mask smaller than its own, whose size it does not tell.
  for (int bits = CPU_SETSIZE; bits <= 1 << 20; bits *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(
        CPU_ALLOC(bits), [](cpu_set_t* set) { CPU_FREE(set); });
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    if (!mask || sched_getaffinity(0, bytes, mask.get()) != 0) continue;
    std::vector<int> cpus;
    for (int cpu = 0; cpu < bits; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, mask.get())) cpus.push_back(cpu);
    return cpus;
  }
  return {};
}

// Returns which CPUs share the last-level cache of `cpu`, as the kernel writes them ("0-3,8");
// nothing if it does not say.
std::string cache_of(int cpu, const std::filesystem::path& root) {
  const std::filesystem::path caches =
      root / "sys/devices/system/cpu" / (std::string("cpu") + std::to_string(cpu)) / "cache";
  std::string shared;
  for (const char* level : {"index3", "index2"}) {
    std::ifstream file(caches / level / "shared_cpu_list");
    if (std::getline(file, shared) && !shared.empty()) break;
  }
  return shared;
}

}  // namespace

int64_t default_replicas(int64_t threads, const std::vector<int>& cpus,
                         const std::filesystem::path& root) {
  std::set<std::string> caches;
  for (const int cpu : cpus) caches.insert(cache_of(cpu, root));
  const auto groups = std::max<int64_t>(2, static_cast<int64_t>(caches.size()));
  return std::clamp<int64_t>(threads, 1, groups);
}

int64_t default_replicas(int64_t threads) {
  return default_replicas(threads, cpus_of_affinity_mask(), "/");
}

}  // namespace trireme
