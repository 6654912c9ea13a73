#include <trireme/common/env.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kMaxRanks = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxPort = 65535;

[[noreturn]] void refuse(const std::string& what, const std::string& next_step, RankOf where = {}) {
  throw std::invalid_argument(error_text("launch", what, where, next_step));
}

struct Range {
  int64_t lowest;
  int64_t highest;
};

int64_t parse_number(const char* name, std::string_view text, Range range) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || number < range.lowest || number > range.highest) {
    refuse(std::string(name) + " is '" + std::string(text) + "', expected a whole number from " +
               std::to_string(range.lowest) + " to " + std::to_string(range.highest),
           "Correct the variable where the program is started, or unset it.");
  }
  return number;
}

// The variables of one process, as numbers where they are numbers.
class Variables {
 public:
  explicit Variables(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const char* name) const { return lookup_(name); }
  bool has(const char* name) const { return lookup_(name).has_value(); }

  std::optional<int64_t> number(const char* name, Range range = {0, kMaxRanks}) const {
    const std::optional<std::string> value = lookup_(name);
    if (!value) return std::nullopt;
    return parse_number(name, *value, range);
  }

 private:
  const EnvironmentLookup& lookup_;
};

// The place that one family of variables gives to this process; the local part may be missing.
struct Place {
  Launcher launcher = Launcher::kAlone;
  int64_t rank = 0;
  int64_t world = 1;
  std::optional<int64_t> local_rank;
  std::optional<int64_t> local_world;
};

struct PlaceNames {
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
};

std::optional<Place> place_named(const Variables& variables, Launcher launcher,
                                 const PlaceNames& names) {
  const auto rank = variables.number(names.rank);
  const auto world = variables.number(names.world, {1, kMaxRanks});
  if (!rank || !world) return std::nullopt;
  return Place{launcher, *rank, *world, variables.number(names.local_rank),
               variables.number(names.local_world, {1, kMaxRanks})};
}

std::optional<Place> place_by_variables(const Variables& variables) {
  return place_named(variables, Launcher::kVariables,
                     {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
}

std::optional<Place> place_by_open_mpi(const Variables& variables) {
  return place_named(variables, Launcher::kOpenMpi,
                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                      "OMPI_COMM_WORLD_LOCAL_SIZE"});
}

// Hydra is mpirun of MPICH and Intel MPI, and one of MVAPICH's. Only it sets MPI_LOCALNRANKS: srun,
// too, may set the other two.
std::optional<Place> place_by_mpich(const Variables& variables) {
  if (variables.has("MPI_LOCALNRANKS")) {
    return place_named(variables, Launcher::kMpich,
                       {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  }
  return place_named(variables, Launcher::kMpich,
                     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                      "MV2_COMM_WORLD_LOCAL_SIZE"});
}

// Reads "4(x2),3": four tasks on each of the first two nodes of the step, three on the next.
std::optional<int64_t> slurm_tasks_on_node(const std::string& tasks_per_node, int64_t node) {
  constexpr const char* kName = "SLURM_STEP_TASKS_PER_NODE";
  std::istringstream groups(tasks_per_node);
  for (std::string group; std::getline(groups, group, ',');) {
    const std::string_view text = group;
    const size_t repeat_at = text.find("(x");
    int64_t nodes = 1;
    if (repeat_at != std::string_view::npos) {
      const std::string_view repeat = text.substr(repeat_at + 2);
      nodes = parse_number(kName, repeat.substr(0, repeat.find(')')), {1, kMaxRanks});
    }
    const int64_t tasks = parse_number(kName, text.substr(0, repeat_at), {1, kMaxRanks});
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return std::nullopt;
}

std::optional<Place> place_by_slurm(const Variables& variables) {
  const auto rank = variables.number("SLURM_PROCID");
  if (!rank) return std::nullopt;
  const auto world = variables.number("SLURM_STEP_NUM_TASKS", {1, kMaxRanks});
  if (!world) return std::nullopt;  // see refuse_batch_script
  auto local_world = variables.number("SLURM_NTASKS_PER_NODE", {1, kMaxRanks});
  if (const auto tasks_per_node = variables.text("SLURM_STEP_TASKS_PER_NODE")) {
    const int64_t node = variables.number("SLURM_NODEID").value_or(0);
    local_world = slurm_tasks_on_node(*tasks_per_node, node);
  }
  return Place{Launcher::kSlurm, *rank, *world, variables.number("SLURM_LOCALID"), local_world};
}

Place find_place(const Variables& variables) {
  for (const auto& reader :
       {place_by_variables, place_by_open_mpi, place_by_mpich, place_by_slurm}) {
    if (const auto place = reader(variables)) return *place;
  }
  return Place{Launcher::kAlone, 0, 1, variables.number("LOCAL_RANK"), std::nullopt};
}

// The script of a batch job has SLURM_PROCID=0 too, but only srun starts tasks. Taken for rank 0 of
// SLURM_NTASKS the script would wait for ranks that nobody starts.
void refuse_batch_script(const Variables& variables) {
  const int64_t tasks = variables.number("SLURM_NTASKS", {1, kMaxRanks}).value_or(1);
  if (!variables.has("SLURM_PROCID") || tasks == 1) return;
  refuse(
      "SLURM allocated " + std::to_string(tasks) +
          " tasks, but srun did not start this process (SLURM_STEP_NUM_TASKS is not set)",
      "Start the program with srun or torchrun, or set RANK=0 and WORLD_SIZE=1 to run it alone.");
}

// Refuses ranks of an unknown launcher: taken for single processes, each would train by itself.
void refuse_unknown_launcher(const Variables& variables) {
  const auto rank = variables.number("PMI_RANK");
  const int64_t world = variables.number("PMI_SIZE", {1, kMaxRanks}).value_or(1);
  if (!rank || world == 1) return;
  refuse(
      "PMI_RANK and PMI_SIZE are set, but nothing tells which ranks share a host (MPI_LOCALRANKID "
      "and MPI_LOCALNRANKS are not set)",
      "Start the program with torchrun, srun or mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK and "
      "LOCAL_WORLD_SIZE.",
      {*rank, world});
}

void refuse_incomplete(const Variables& variables, const Place& found) {
  if (found.launcher == Launcher::kVariables) return;
  if (variables.has("RANK")) {
    refuse("RANK is set but WORLD_SIZE is not, expected both or neither",
           "Start the program with torchrun, or set WORLD_SIZE to the number of ranks.");
  }
  const auto world = variables.number("WORLD_SIZE", {1, kMaxRanks});
  if (world && found.launcher == Launcher::kAlone) {
    refuse("WORLD_SIZE is set but RANK is not, expected both or neither",
           "Start the program with torchrun, or set RANK to this process's number.");
  }
  if (world && *world != found.world) {
    refuse("WORLD_SIZE is " + std::to_string(*world) + " but the launcher started " +
               std::to_string(found.world) + " ranks",
           "Unset WORLD_SIZE, or set RANK as well.", {found.rank, found.world});
  }
  if (found.launcher != Launcher::kAlone) return;
  refuse_batch_script(variables);
  refuse_unknown_launcher(variables);
}

void check_rank(RankOf where) {
  if (where.world < 1 || where.world > kMaxRanks) {
    refuse("world is " + std::to_string(where.world) + ", expected at least 1",
           "Pass the number of ranks.");
  }
  if (where.rank < 0 || where.rank >= where.world) {
    refuse(
        "rank is " + std::to_string(where.rank) + ", expected 0 to " +
            std::to_string(where.world - 1),
        "Give every process a rank of its own below the world size, and all the same world size.",
        where);
  }
}

// The caller decides rank and world; a launcher's variables about hosts count if they are about the
// same rank.
Place place_for_caller(const Variables& variables, RankOf caller) {
  const Place found = find_place(variables);
  if (found.rank == caller.rank && found.world == caller.world) return found;
  return Place{Launcher::kCaller, caller.rank, caller.world, variables.number("LOCAL_RANK"),
               variables.number("LOCAL_WORLD_SIZE", {1, kMaxRanks})};
}

void check_local_rank(const LaunchEnvironment& environment) {
  if (environment.local_world > environment.world) {
    refuse("this host's share of the ranks is " + std::to_string(environment.local_world) +
               ", expected at most " + std::to_string(environment.world),
           "Correct LOCAL_WORLD_SIZE, or unset it.", environment.rank_of());
  }
  if (environment.local_rank >= environment.local_world) {
    refuse("local rank is " + std::to_string(environment.local_rank) + ", expected 0 to " +
               std::to_string(environment.local_world - 1),
           "Number the ranks of each host from 0.", environment.rank_of());
  }
}

// Returns the first host of a list: "node[001-004,007],login2" -> "node001"
std::string first_slurm_host(const std::string& node_list) {
  std::string host;
  bool in_brackets = false;
  bool taken = false;  // the first entry of these brackets
  for (const char c : node_list) {
    if (c == '[') {
      in_brackets = true;
      taken = false;
    } else if (c == ']') {
      in_brackets = false;
    } else if (in_brackets) {
      taken = taken || c == '-' || c == ',';
      if (!taken) host += c;
    } else if (c == ',') {
      break;
    } else {
      host += c;
    }
  }
  return host;
}

// Returns a port below the range from which the kernel takes ports of outgoing connections (32768
// on), and different for the steps that a job runs at the same time.
int64_t slurm_port(const Variables& variables) {
  constexpr int64_t kFirst = 12000;
  constexpr int64_t kCount = 20000;
  constexpr Range kAnyId{0, std::numeric_limits<uint32_t>::max()};
  const auto job = variables.number("SLURM_JOB_ID", kAnyId);
  if (!job) return 0;
  const int64_t step = variables.number("SLURM_STEP_ID", kAnyId).value_or(0);
  return kFirst + (*job * 31 + step) % kCount;
}

void find_master(const Variables& variables, LaunchEnvironment& environment) {
  environment.master_addr = variables.text("MASTER_ADDR").value_or("");
  environment.master_port = variables.number("MASTER_PORT", {1, kMaxPort}).value_or(0);
  const bool one_host = environment.local_world == environment.world;
  if (environment.launcher == Launcher::kSlurm) {
    if (environment.master_port == 0) environment.master_port = slurm_port(variables);
    // The node from which srun was called comes last: with salloc that is a login node, where no
    // rank runs.
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      const std::string nodes = variables.text(name).value_or("");
      if (environment.master_addr.empty()) environment.master_addr = first_slurm_host(nodes);
    }
    if (environment.master_addr.empty()) {
      environment.master_addr = variables.text("SLURM_LAUNCH_NODE_IPADDR").value_or("");
    }
  }
  const bool by_mpirun =
      environment.launcher == Launcher::kOpenMpi || environment.launcher == Launcher::kMpich;
  if (by_mpirun && one_host && environment.master_addr.empty()) {
    environment.master_addr = "127.0.0.1";
  }
}

std::optional<int64_t> explicit_omp_threads(const Variables& variables) {
  // A list is one number per nesting level, the first is the one that counts here.
  const std::string list = variables.text("OMP_NUM_THREADS").value_or("");
  if (list.empty()) return std::nullopt;
  const int64_t threads = parse_number(
      "OMP_NUM_THREADS", std::string_view(list).substr(0, list.find(',')), {1, kMaxRanks});
  // torchrun sets 1 where the user sets nothing; from here both look the same.
  const bool torchrun_default = threads == 1 && variables.has("TORCHELASTIC_RUN_ID");
  return torchrun_default ? std::nullopt : std::optional(threads);
}

}  // namespace

std::optional<std::string> lookup_process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

LaunchEnvironment read_launch_environment(std::optional<RankOf> caller,
                                          const EnvironmentLookup& lookup) {
  const Variables variables(lookup);
  Place place;
  if (caller) {
    place = place_for_caller(variables, *caller);
  } else {
    place = find_place(variables);
    refuse_incomplete(variables, place);
  }

  check_rank({place.rank, place.world});

  LaunchEnvironment environment;
  environment.launcher = place.launcher;
  environment.rank = place.rank;
  environment.world = place.world;
  environment.local_world = place.local_world.value_or(place.world);
  environment.local_rank = place.local_rank.value_or(place.rank % environment.local_world);
  check_local_rank(environment);
  find_master(variables, environment);
  environment.init_method = variables.text("TRIREME_INIT_METHOD").value_or("");
  environment.attempt = variables.number("TORCHELASTIC_RESTART_COUNT").value_or(0);
  environment.agent_serves_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (environment.launcher == Launcher::kSlurm) {
    environment.cpus_per_task = variables.number("SLURM_CPUS_PER_TASK", {1, kMaxRanks});
  }
  environment.omp_num_threads = explicit_omp_threads(variables);
  return environment;
}

std::optional<int64_t> threads_per_rank(const LaunchEnvironment& environment, int64_t cpus) {
  if (environment.omp_num_threads) return std::nullopt;
  // srun gives each task CPUs of its own where it binds tasks; else all tasks see those of the
  // step.
  if (environment.cpus_per_task) return std::min(cpus, *environment.cpus_per_task);
  return std::max<int64_t>(1, cpus / environment.local_world);
}

}  // namespace trireme
