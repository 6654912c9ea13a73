#include <trireme/strategies/data_parallel/core_groups.h>

#include <catch_torch.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace trireme::core_groups_test {

namespace {

// A machine's caches as the kernel shows them, in a folder.
class FakeMachine {
 public:
  FakeMachine() { std::filesystem::create_directories(root); }
  ~FakeMachine() { std::filesystem::remove_all(root); }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  // One list per CPU, "" for one without that cache.
  void has(const std::string& index, const std::vector<std::string>& shared) const {
    for (size_t cpu = 0; cpu < shared.size(); ++cpu) {
      if (shared[cpu].empty()) continue;
      const auto folder = root / "sys/devices/system/cpu" /
                          (std::string("cpu") + std::to_string(cpu)) / "cache" / index;
      std::filesystem::create_directories(folder);
      std::ofstream(folder / "shared_cpu_list") << shared[cpu] << "\n";
    }
  }

  std::filesystem::path root = std::filesystem::temp_directory_path() /
                               (std::string("trireme_caches_") + std::to_string(getpid()));
};

}  // namespace

TEST_CASE("one replica for each last-level cache") {
  const FakeMachine machine;
  machine.has("index3", {"0-1", "0-1", "2-3", "2-3", "4-5", "4-5"});
  machine.has("index2", {"0", "1", "2", "3", "4", "5"});
  CHECK(default_replicas(6, {0, 1, 2, 3, 4, 5}, machine.root) == 3);
  CHECK(default_replicas(64, {0, 1, 2, 3, 4, 5}, machine.root) == 3);
  SECTION("of the CPUs that the process may use") {
    CHECK(default_replicas(4, {0, 1, 4, 5}, machine.root) == 2);
    CHECK(default_replicas(2, {2, 3}, machine.root) == 2);
  }
  SECTION("but no more than threads") {
    CHECK(default_replicas(2, {0, 1, 2, 3, 4, 5}, machine.root) == 2);
    CHECK(default_replicas(1, {0, 1, 2, 3, 4, 5}, machine.root) == 1);
  }
}

TEST_CASE("without a third level it is the second") {
  const FakeMachine machine;
  machine.has("index2", {"0-3", "0-3", "0-3", "0-3", "4-7", "4-7", "4-7", "4-7", "8"});
  CHECK(default_replicas(8, {0, 1, 2, 3, 4, 5, 6, 7}, machine.root) == 2);
  CHECK(default_replicas(9, {0, 1, 2, 3, 4, 5, 6, 7, 8}, machine.root) == 3);
}

TEST_CASE("two where there is one cache, or none is known, and two threads") {
  const FakeMachine machine;
  CHECK(default_replicas(4, {0, 1, 2, 3}, machine.root) == 2);
  CHECK(default_replicas(1, {0}, machine.root) == 1);
  CHECK(default_replicas(4, {}, machine.root) == 2);
  machine.has("index3", {"0-3", "0-3", "0-3", "0-3"});
  CHECK(default_replicas(4, {0, 1, 2, 3}, machine.root) == 2);
  CHECK(default_replicas(0, {0, 1, 2, 3}, machine.root) == 1);
}

TEST_CASE("this machine has an answer") {
  CHECK(default_replicas(1) == 1);
  CHECK(default_replicas(2) == 2);
}

}  // namespace trireme::core_groups_test
