#pragma once

#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/fault_board.h>
#include <trireme/comm/hosts/host_layout.h>
#include <trireme/comm/hosts/host_leg.h>
#include <trireme/shm/collectives.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// The collectives of a group whose ranks are on several hosts, with the signatures of
// shm::Collectives: through shared memory inside each host, over the legs (see host_layout.h)
// between them. A host's ranks reduce or gather their data first, so that every byte enters a host
// once; an all-reduce sends as much as a ring of hosts, 2 (H-1)/H of the tensor per host, and a
// large one goes in chunks: the legs carry one while the next is reduced.
//
// Each element is reduced on one host in the order of the hosts, on each of these in the order of
// its ranks, so all ranks hold the same bits, in every run. 16-bit floats are summed in fp32 and
// rounded once per host, to halve what travels, then once at the end. kAvg divides once, at the
// end, by the number of all ranks.
//
// Every collective begins with a meeting: of the ranks of a host, then of the hosts, which compare
// their operations. Ranks that do not agree all throw Fault(kMismatch), nothing has moved, and the
// group goes on. Any other error ends the group on all hosts: the first rank to see it leaves a
// message in the Store and closes its leg; ranks that find a leg closed look for that message.
//
// Extra memory per rank, beside that of its host: three chunks on their way, some MiB each (struct
// Room). One thread at a time, but close() from any.
class MultiHostCollectives {
 public:
  // Collective over all ranks of the group; `store` carries no other group's keys. The host group
  // must outlive this.
  MultiHostCollectives(shm::HostGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
                       const GlooOptions& options);

  void all_reduce(const shm::Pieces& memory, const shm::ReduceOptions& how,
                  const shm::CallOptions& call);
  void reduce(const shm::Pieces& memory, int64_t root, const shm::ReduceOptions& how,
              const shm::CallOptions& call);
  void reduce_scatter(const shm::Pieces& output, const std::vector<shm::Pieces>& inputs,
                      const shm::ReduceOptions& how, const shm::CallOptions& call);
  void all_gather(const std::vector<shm::Pieces>& outputs, const shm::Pieces& input,
                  shm::Dtype dtype, const shm::CallOptions& call);
  void broadcast(const shm::Pieces& memory, int64_t root, shm::Dtype dtype,
                 const shm::CallOptions& call);
  // Gathers parts[r], the values of rank r of the group, in memory that the ranks of this host
  // share. Parts of other hosts come to their places, split over the legs; parts of this host are
  // copied only to be sent. No rank returns before its host has all of them.
  void all_gather_in_host(const std::vector<shm::Pieces>& parts, const shm::CallOptions& call);
  // Makes on each host a new segment that its ranks map, also for a rank alone. All ranks of the
  // group get none, with the same reason, if one of them cannot have it.
  shm::SharedSegment share_segment(int64_t bytes, const shm::CallOptions& call);
  void barrier(const shm::CallOptions& call);
  void refuse(std::string_view reason, const shm::CallOptions& call);

  int64_t world() const { return layout_.world; }
  // Returns the number of the last collective that began.
  uint64_t sequence() const { return sequence_; }

  // Ends the group on all hosts, with that reason.
  void close(const std::string& reason) noexcept;

 private:
  class Scope;
  class Stages;
  class SlicedStages;
  class Summing;
  class Scattering;
  class Gathering;
  class Placing;
  class Casting;
  struct Header;
  // Memory for one chunk on its way.
  struct Room {
    std::byte* partial(int64_t bytes) { return at_least(bytes, partial_); }
    std::byte* received(int64_t bytes) { return at_least(bytes, received_); }

   private:
    static std::byte* at_least(int64_t bytes, std::vector<std::byte>& memory) {
      if (memory.size() < static_cast<size_t>(bytes)) memory.resize(static_cast<size_t>(bytes));
      return memory.data();
    }
    std::vector<std::byte> partial_;
    std::vector<std::byte> received_;
  };

  void run(const shm::Operation& operation, const shm::CallOptions& call,
           const std::function<void(const Scope&)>& stages);
  void meet_on_host(const shm::Operation& operation, const shm::CallOptions& call);
  std::string compare_with_hosts(const Header& mine, shm::Clock::time_point deadline);
  void check_reducible(const shm::ReduceOptions& how, const shm::CallOptions& call);
  void sum(shm::Operation operation, const shm::Pieces& memory, const shm::ReduceOptions& how,
           const shm::CallOptions& call);

  void check_usable();
  std::optional<std::string> failure();  // any thread
  std::optional<shm::Fault> word_of_this_host(const std::string& operation);
  shm::Fault reason_for(const std::string& broken, const std::string& operation);

  Room& room(int64_t chunk) { return rooms_[static_cast<size_t>(chunk) % rooms_.size()]; }

  shm::HostGroup& group_;
  HostLayout layout_;
  FaultBoard board_;
  std::unique_ptr<shm::Collectives> local_;  // null for a rank alone on its host
  uint64_t sequence_ = 0;
  std::array<Room, 3> rooms_;
  std::mutex reason_mutex_;
  std::string reason_;  // why the group has ended
  // Null for a rank without a leg; last, since its thread uses the above.
  std::unique_ptr<HostLeg> leg_;
};

}  // namespace trireme
