#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace trireme {

struct InitOptions {
  // The backend: "trireme" (shared memory between the ranks of a host, see
  // comm/backend/shm_backend.h), "gloo", "nccl", or one for each kind of device:
  // "cpu:gloo,cuda:nccl". Empty: "trireme" on a CPU device, "cpu:trireme,cuda:nccl" on a CUDA
  // device.
  std::string backend{};
  // The device on which this rank computes; a CUDA device without an index means the one numbered
  // like the local rank. Unset: CUDA if the backend has NCCL, or if it is empty and the program
  // sees a GPU, which takes libtorch_cuda: find_package(Trireme COMPONENTS CUDA). Else the CPU;
  // rank 0 warns if the machine has a GPU and that library is missing.
  std::optional<c10::Device> device{};
  // The limit of one collective; unset: 30 minutes. Also that of the wait for the other ranks at
  // the start; unset: 5 minutes.
  std::optional<std::chrono::milliseconds> timeout{};
  std::string init_method{};      // see RendezvousRequest
  std::optional<int64_t> rank{};  // both or neither, in place of what the environment says
  std::optional<int64_t> world{};
  bool set_threads = true;  // at::set_num_threads(threads_per_rank(...)), see common/env.h
};

// This process as one rank of a run: its numbers, its device, and the group of all ranks. Movable;
// one thread at a time.
class TRIREME_API Context {
 public:
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();  // shutdown()

  int64_t rank() const { return where_.rank; }
  int64_t world() const { return where_.world; }
  int64_t local_rank() const { return local_.rank; }
  int64_t local_world() const { return local_.world; }
  RankOf rank_of() const { return where_; }
  c10::Device device() const { return device_; }

  // Returns the group of all ranks; one object for all callers. Like the two below it throws
  // c10::ValueError after shutdown().
  std::shared_ptr<Communicator> communicator() const;

  // Return the c10d objects below, for users of c10d (its headers are not included here).
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // Leaves the group. Every rank calls it last, after the models that use the group are gone. If
  // this rank serves the Store it waits for the others to leave, at most half a minute (a second
  // while an exception passes), and warns if they have not. Calling it again does nothing.
  void shutdown() noexcept;

 private:
  struct Group;
  friend Context init(const InitOptions& options);
  Context(RankOf where, RankOf local, c10::Device device, std::unique_ptr<Group> group);
  const Group& group() const;

  RankOf where_;
  RankOf local_;
  c10::Device device_;
  std::unique_ptr<Group> group_;
};

// Makes this process a rank: reads its place from the environment (read_launch_environment), meets
// the others, connects the group, selects the CUDA device and sets the number of threads.
// Collective. World 1, when nobody launched several ranks, opens no port.
//
// Throws std::invalid_argument for a contradictory environment, c10::ValueError for options that
// cannot be honoured, c10::DistBackendError when the ranks do not find each other.
TRIREME_API Context init(const InitOptions& options = {});

// Returns the group of the Context that init() made last in this process, while that lives. Throws
// c10::ValueError when there is none.
TRIREME_API std::shared_ptr<Communicator> current_communicator();

}  // namespace trireme
