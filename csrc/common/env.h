#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace trireme {

// The source of this process's place.
enum class Launcher : uint8_t {
  kAlone,      // no launcher: one process, world 1
  kVariables,  // RANK and WORLD_SIZE: torchrun, or set by hand
  kOpenMpi,    // mpirun of Open MPI
  kMpich,      // mpirun of MPICH, Intel MPI or MVAPICH
  kSlurm,      // srun
  kCaller,     // rank and world were arguments, and no launcher says the same (mp.spawn, threads)
};

// The place of this process among its peers, as its environment tells it. All members are
// consistent: 0 <= rank < world, 0 <= local_rank < local_world <= world.
struct LaunchEnvironment {
  Launcher launcher = Launcher::kAlone;
  int64_t rank = 0;
  int64_t world = 1;
  int64_t local_rank = 0;           // among the ranks of this host
  int64_t local_world = 1;          // how many ranks this host has
  std::string master_addr;          // host of rank 0; empty: unknown
  int64_t master_port = 0;          // where rank 0 listens there; 0: unknown
  std::string init_method;          // TRIREME_INIT_METHOD, see RendezvousRequest
  int64_t attempt = 0;              // how often torchrun has restarted the ranks
  bool agent_serves_store = false;  // torchrun's agent already listens at master_addr:master_port
  std::optional<int64_t> cpus_per_task;  // CPUs that SLURM gave to each rank
  std::optional<int64_t>
      omp_num_threads;  // OMP_NUM_THREADS, unless it is the 1 that torchrun puts there

  RankOf rank_of() const { return {rank, world}; }
};

// Returns one environment variable; nothing when it is unset or empty.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;
TRIREME_API std::optional<std::string> lookup_process_environment(const char* name);

// Reads, in this order of trust: `caller` (only complements it from the environment); RANK and
// WORLD_SIZE with LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; Open MPI's
// OMPI_COMM_WORLD_*; PMI_RANK and PMI_SIZE beside MPI_LOCALRANKID and MPI_LOCALNRANKS (MPICH, Intel
// MPI), or MV2_COMM_WORLD_* (MVAPICH); SLURM's step variables; else world 1. mpirun comes before
// SLURM because inside a batch script it hands the ranks of a host the same SLURM_PROCID.
//
// If no variable gives local ranks, all ranks are taken to be on one host. Under SLURM rank 0 is on
// the first host of the step, and its port follows from the job's and the step's number.
//
// Throws std::invalid_argument (ValueError in Python) for variables that are incomplete, contradict
// each other, are no numbers or out of range, in a SLURM batch script of several tasks that srun
// did not start, and where PMI_RANK and PMI_SIZE of several ranks stand alone.
TRIREME_API LaunchEnvironment
read_launch_environment(std::optional<RankOf> caller = std::nullopt,
                        const EnvironmentLookup& lookup = lookup_process_environment);

// Returns how many threads this rank should compute with so that the ranks of a host share `cpus`
// (see usable_cpus) without fighting: SLURM's cpus per task where known, else cpus / local_world,
// at least 1. Returns nothing when OMP_NUM_THREADS already says it.
TRIREME_API std::optional<int64_t> threads_per_rank(const LaunchEnvironment& environment,
                                                    int64_t cpus);

}  // namespace trireme
