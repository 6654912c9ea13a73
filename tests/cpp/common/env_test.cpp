#include <trireme/common/env.h>

#include <trireme/common/cpus.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sched.h>
#include <stdexcept>
#include <string>

#include "catch_torch.h"

namespace trireme::env_test {
namespace {

using Values = std::map<std::string, std::string>;

LaunchEnvironment read(const Values& values, std::optional<RankOf> caller = std::nullopt) {
  return read_launch_environment(caller, [&](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const Values& values, std::optional<RankOf> caller = std::nullopt) {
  try {
    read(values, caller);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

// What srun gives to task `procid` of a step of two nodes with two tasks and one node with one.
Values slurm_step(const std::string& procid, const std::string& localid, const std::string& node) {
  return {{"SLURM_PROCID", procid},
          {"SLURM_LOCALID", localid},
          {"SLURM_NODEID", node},
          {"SLURM_NTASKS", "5"},
          {"SLURM_STEP_NUM_TASKS", "5"},
          {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
          {"SLURM_STEP_NODELIST", "rack[2-3]gpu[007,009-012],login1"},
          {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"},
          {"SLURM_JOB_ID", "123456"},
          {"SLURM_STEP_ID", "0"}};
}

}  // namespace

TEST_CASE("without a launcher a process is alone") {
  const LaunchEnvironment environment = read({});
  CHECK(environment.launcher == Launcher::kAlone);
  CHECK(environment.rank == 0);
  CHECK(environment.world == 1);
  CHECK(environment.local_world == 1);
  CHECK(environment.master_addr.empty());
}

TEST_CASE("torchrun's variables") {
  const LaunchEnvironment environment = read({{"RANK", "5"},
                                              {"WORLD_SIZE", "8"},
                                              {"LOCAL_RANK", "1"},
                                              {"LOCAL_WORLD_SIZE", "4"},
                                              {"MASTER_ADDR", "host"},
                                              {"MASTER_PORT", "29500"},
                                              {"TORCHELASTIC_RESTART_COUNT", "3"},
                                              {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  CHECK(environment.launcher == Launcher::kVariables);
  CHECK(environment.rank == 5);
  CHECK(environment.world == 8);
  CHECK(environment.local_rank == 1);
  CHECK(environment.local_world == 4);
  CHECK(environment.master_addr == "host");
  CHECK(environment.master_port == 29500);
  CHECK(environment.attempt == 3);
  CHECK(environment.agent_serves_store);
}

TEST_CASE("RANK and WORLD_SIZE alone mean one host") {
  const LaunchEnvironment environment = read({{"RANK", "2"}, {"WORLD_SIZE", "3"}});
  CHECK(environment.local_rank == 2);
  CHECK(environment.local_world == 3);
  CHECK_FALSE(environment.agent_serves_store);
}

TEST_CASE("contradictions and nonsense are refused by name") {
  CHECK(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}) ==
        "[launch] rank is 2, expected 0 to 1 (rank 2 of 2). Give every process a rank of its own "
        "below the world size, "
        "and all the same world size.");
  CHECK(refusal({{"RANK", "0"}}) ==
        "[launch] RANK is set but WORLD_SIZE is not, expected both or neither. Start the program "
        "with torchrun, or set "
        "WORLD_SIZE to the number of ranks.");
  CHECK(refusal({{"WORLD_SIZE", "2"}}) ==
        "[launch] WORLD_SIZE is set but RANK is not, expected both or neither. Start the program "
        "with torchrun, or set "
        "RANK to this process's number.");
  for (const char* number : {"one", "-1", "1.5", "0x1", " 1", "99999999999999999999"}) {
    CHECK(refusal({{"RANK", number}, {"WORLD_SIZE", "2"}}) ==
          std::string("[launch] RANK is '") + number +
              "', expected a whole number from 0 to 2147483647. Correct the variable where the "
              "program is started, or "
              "unset it.");
  }
  for (const char* port : {"0", "65536", "-1", "http"}) {
    CHECK(refusal({{"MASTER_PORT", port}}) ==
          std::string("[launch] MASTER_PORT is '") + port +
              "', expected a whole number from 1 to 65535. Correct the variable where the program "
              "is started, or "
              "unset it.");
  }
  const Values two_ranks{{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  Values local = two_ranks;
  local["LOCAL_WORLD_SIZE"] = "4";
  CHECK(refusal(local) ==
        "[launch] this host's share of the ranks is 4, expected at most 2 (rank 0 of 2). Correct "
        "LOCAL_WORLD_SIZE, or "
        "unset it.");
  local["LOCAL_WORLD_SIZE"] = "1";
  local["LOCAL_RANK"] = "1";
  CHECK(refusal(local) ==
        "[launch] local rank is 1, expected 0 to 0 (rank 0 of 2). Number the ranks of each host "
        "from 0.");
  CHECK(refusal({{"LOCAL_RANK", "1"}}) ==
        "[launch] local rank is 1, expected 0 to 0 (rank 0 of 1). Number the ranks of each host "
        "from 0.");
}

TEST_CASE("a SLURM step: uneven nodes, the first host, a port of its own") {
  const LaunchEnvironment last = read(slurm_step("4", "0", "2"));
  CHECK(last.launcher == Launcher::kSlurm);
  CHECK(last.rank == 4);
  CHECK(last.world == 5);
  CHECK(last.local_world == 1);
  const LaunchEnvironment second = read(slurm_step("3", "1", "1"));
  CHECK(second.local_rank == 1);
  CHECK(second.local_world == 2);
  CHECK(second.master_addr == "rack2gpu007");

  CHECK(second.master_port == last.master_port);
  CHECK(second.master_port >= 12000);
  CHECK(second.master_port < 32000);
  Values other_step = slurm_step("3", "1", "1");
  other_step["SLURM_STEP_ID"] = "1";
  CHECK(read(other_step).master_port != second.master_port);

  Values told = slurm_step("3", "1", "1");
  told["MASTER_ADDR"] = "elsewhere";
  told["MASTER_PORT"] = "4711";
  CHECK(read(told).master_addr == "elsewhere");
  CHECK(read(told).master_port == 4711);
}

TEST_CASE("SLURM's other node lists") {
  Values step = slurm_step("0", "0", "0");
  step["SLURM_STEP_NODELIST"] = "single";
  CHECK(read(step).master_addr == "single");
  step["SLURM_STEP_NODELIST"] = "a1,a[2-3]";
  CHECK(read(step).master_addr == "a1");
  step.erase("SLURM_STEP_NODELIST");
  step["SLURM_JOB_NODELIST"] = "node[4,6]";
  CHECK(read(step).master_addr == "node4");
  step.erase("SLURM_JOB_NODELIST");
  CHECK(read(step).master_addr == "10.0.0.1");
  step["SLURM_STEP_TASKS_PER_NODE"] = "many";
  CHECK(refusal(step).find("SLURM_STEP_TASKS_PER_NODE is 'many'") != std::string::npos);
}

TEST_CASE("the script of a SLURM job is not a rank") {
  const Values script{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}};
  CHECK(refusal(script) ==
        "[launch] SLURM allocated 4 tasks, but srun did not start this process "
        "(SLURM_STEP_NUM_TASKS is not set). Start "
        "the program with srun or torchrun, or set RANK=0 and WORLD_SIZE=1 to run it alone.");
  CHECK(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}).world == 1);

  Values alone = script;
  alone["RANK"] = "0";
  alone["WORLD_SIZE"] = "1";
  CHECK(read(alone).world == 1);
  CHECK(read(script, RankOf{1, 2}).rank == 1);
}

TEST_CASE("WORLD_SIZE beside a launcher must agree with it") {
  Values step = slurm_step("3", "1", "1");
  step["WORLD_SIZE"] = "5";
  CHECK(read(step).world == 5);
  step["WORLD_SIZE"] = "6";
  CHECK(refusal(step) ==
        "[launch] WORLD_SIZE is 6 but the launcher started 5 ranks (rank 3 of 5). Unset "
        "WORLD_SIZE, or set RANK as "
        "well.");
}

TEST_CASE("mpirun inside a SLURM job counts, not the job") {
  Values values = slurm_step("0", "0", "0");
  values["OMPI_COMM_WORLD_RANK"] = "3";
  values["OMPI_COMM_WORLD_SIZE"] = "4";
  values["OMPI_COMM_WORLD_LOCAL_RANK"] = "3";
  values["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4";
  const LaunchEnvironment environment = read(values);
  CHECK(environment.launcher == Launcher::kOpenMpi);
  CHECK(environment.rank == 3);
  CHECK(environment.world == 4);
  CHECK(environment.master_addr == "127.0.0.1");
  values["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  values["OMPI_COMM_WORLD_LOCAL_RANK"] = "1";
  CHECK(read(values).master_addr.empty());
}

TEST_CASE("mpirun of MPICH, Intel MPI and MVAPICH") {
  Values hydra{
      {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  const LaunchEnvironment environment = read(hydra);
  CHECK(environment.launcher == Launcher::kMpich);
  CHECK(environment.rank == 3);
  CHECK(environment.world == 4);
  CHECK(environment.local_rank == 1);
  CHECK(environment.local_world == 2);
  CHECK(environment.master_addr.empty());
  const LaunchEnvironment mvapich = read({{"MV2_COMM_WORLD_RANK", "1"},
                                          {"MV2_COMM_WORLD_SIZE", "2"},
                                          {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
                                          {"MV2_COMM_WORLD_LOCAL_SIZE", "2"}});
  CHECK(mvapich.launcher == Launcher::kMpich);
  CHECK(mvapich.rank == 1);
  CHECK(mvapich.local_world == 2);
  CHECK(mvapich.master_addr == "127.0.0.1");

  SECTION("Hydra starts one of its own per host with srun") {
    hydra.merge(slurm_step("1", "0", "1"));
    CHECK(read(hydra).launcher == Launcher::kMpich);
    CHECK(read(hydra).rank == 3);
  }
  SECTION("srun may set PMI's variables, too") {
    Values step = slurm_step("3", "1", "1");
    step["PMI_RANK"] = "3";
    step["PMI_SIZE"] = "5";
    CHECK(read(step).launcher == Launcher::kSlurm);
    CHECK(read(step).local_rank == 1);
  }
  SECTION("torchrun under mpirun, one per host") {
    hydra["RANK"] = "6";
    hydra["WORLD_SIZE"] = "8";
    CHECK(read(hydra).launcher == Launcher::kVariables);
    CHECK(read(hydra).rank == 6);
  }
  SECTION("of a launcher that does not say which ranks share a host") {
    CHECK(refusal({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}) ==
          "[launch] PMI_RANK and PMI_SIZE are set, but nothing tells which ranks share a host "
          "(MPI_LOCALRANKID and MPI_LOCALNRANKS are not set) (rank 1 of 4). Start the program with "
          "torchrun, srun or mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.");
    CHECK(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).world == 1);
    CHECK(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}, RankOf{1, 4}).rank == 1);
  }
}

TEST_CASE("numbers from the caller go before the environment") {
  const Values torchrun{
      {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  const LaunchEnvironment same = read(torchrun, RankOf{3, 4});
  CHECK(same.local_rank == 1);
  CHECK(same.local_world == 2);

  const LaunchEnvironment spawned = read({{"WORLD_SIZE", "9"}}, RankOf{1, 2});
  CHECK(spawned.launcher == Launcher::kCaller);
  CHECK(spawned.rank == 1);
  CHECK(spawned.world == 2);
  CHECK(spawned.local_world == 2);

  CHECK(refusal({}, RankOf{2, 2}).find("[launch] rank is 2, expected 0 to 1") == 0);
  CHECK(refusal({}, RankOf{-1, 2}).find("[launch] rank is -1, expected 0 to 1") == 0);
  CHECK(refusal({}, RankOf{0, 0}).find("[launch] world is 0, expected at least 1") == 0);
}

TEST_CASE("threads: a host's CPUs are shared, what the user says stays") {
  const Values four_of_eight{{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"LOCAL_WORLD_SIZE", "4"}};
  CHECK(threads_per_rank(read(four_of_eight), 16) == 4);
  CHECK(threads_per_rank(read(four_of_eight), 2) == 1);

  Values torchrun = four_of_eight;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";
  torchrun["OMP_NUM_THREADS"] = "1";
  CHECK(threads_per_rank(read(torchrun), 16) == 4);
  torchrun["OMP_NUM_THREADS"] = "3";
  CHECK(threads_per_rank(read(torchrun), 16) == std::nullopt);
  CHECK(threads_per_rank(read({{"OMP_NUM_THREADS", "1"}}), 16) == std::nullopt);
  CHECK(threads_per_rank(read({{"OMP_NUM_THREADS", "4,2"}}), 16) == std::nullopt);
  CHECK(refusal({{"OMP_NUM_THREADS", "all"}}).find("OMP_NUM_THREADS is 'all'") !=
        std::string::npos);

  Values slurm = slurm_step("0", "0", "0");
  slurm["SLURM_CPUS_PER_TASK"] = "6";
  CHECK(threads_per_rank(read(slurm), 6) == 6);
  CHECK(threads_per_rank(read(slurm), 16) == 6);
  CHECK(threads_per_rank(read(slurm), 2) == 2);
}

TEST_CASE("an empty variable is an unset one") {
  ::setenv("TRIREME_TEST_EMPTY", "", 1);
  CHECK(lookup_process_environment("TRIREME_TEST_EMPTY") == std::nullopt);
  ::setenv("TRIREME_TEST_EMPTY", "x", 1);
  CHECK(lookup_process_environment("TRIREME_TEST_EMPTY") == "x");
  ::unsetenv("TRIREME_TEST_EMPTY");
}

namespace {

// A folder that looks like the root of a machine with control groups.
class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = (std::filesystem::temp_directory_path() / "trireme_root_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }

  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

int64_t cpus_in_mask() {
  cpu_set_t mask;
  sched_getaffinity(0, sizeof(mask), &mask);
  return CPU_COUNT(&mask);
}

}  // namespace

TEST_CASE("without control groups the affinity mask counts") {
  CHECK(usable_cpus(FakeRoot().path()) == cpus_in_mask());
}

TEST_CASE("a quota of the control group or of one above it counts") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/job/task\n");
  root.write("sys/fs/cgroup/job/task/cpu.max", "max 100000\n");
  CHECK(usable_cpus(root.path()) == cpus_in_mask());
  root.write("sys/fs/cgroup/job/cpu.max", "190000 100000\n");
  CHECK(usable_cpus(root.path()) == 1);
  root.write("sys/fs/cgroup/job/cpu.max", "50000 100000\n");
  CHECK(usable_cpus(root.path()) == 1);
}

TEST_CASE("a quota of the old control groups counts") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "3:cpuset:/job\n2:cpu,cpuacct:/job\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  CHECK(usable_cpus(root.path()) == cpus_in_mask());
  root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  CHECK(usable_cpus(root.path()) == 1);
}

}  // namespace trireme::env_test
