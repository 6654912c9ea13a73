#pragma once

#include <trireme/comm/hosts/multi_host_collectives.h>
#include <trireme/shm/collectives.h>

#include <utility>

namespace trireme {

// The collectives of a group, on one host or over several. Holds only references; copy freely.
class GroupCollectives {
 public:
  explicit GroupCollectives(shm::Collectives& one_host) : one_host_(&one_host) {}
  explicit GroupCollectives(MultiHostCollectives& hosts) : hosts_(&hosts) {}

  // Returns the number of the last collective that began.
  uint64_t sequence() const { return hosts_ ? hosts_->sequence() : one_host_->group().sequence(); }
  int64_t world() const { return hosts_ ? hosts_->world() : one_host_->group().world(); }

  template <typename... Arguments>
  void all_reduce(Arguments&&... arguments) const {
    hosts_ ? hosts_->all_reduce(arguments...) : one_host_->all_reduce(arguments...);
  }
  template <typename... Arguments>
  void reduce(Arguments&&... arguments) const {
    hosts_ ? hosts_->reduce(arguments...) : one_host_->reduce(arguments...);
  }
  template <typename... Arguments>
  void reduce_scatter(Arguments&&... arguments) const {
    hosts_ ? hosts_->reduce_scatter(arguments...) : one_host_->reduce_scatter(arguments...);
  }
  template <typename... Arguments>
  void all_gather(Arguments&&... arguments) const {
    hosts_ ? hosts_->all_gather(arguments...) : one_host_->all_gather(arguments...);
  }
  template <typename... Arguments>
  void broadcast(Arguments&&... arguments) const {
    hosts_ ? hosts_->broadcast(arguments...) : one_host_->broadcast(arguments...);
  }
  void barrier(const shm::CallOptions& call) const {
    hosts_ ? hosts_->barrier(call) : one_host_->barrier(call);
  }
  void refuse(std::string_view reason, const shm::CallOptions& call) const {
    hosts_ ? hosts_->refuse(reason, call) : one_host_->refuse(reason, call);
  }

  // Return the collectives for operations that need all ranks to share memory, and for those that
  // are for groups on several hosts.
  shm::Collectives& one_host() const { return *one_host_; }
  MultiHostCollectives& hosts() const { return *hosts_; }

 private:
  shm::Collectives* one_host_ = nullptr;
  MultiHostCollectives* hosts_ = nullptr;
};

}  // namespace trireme
