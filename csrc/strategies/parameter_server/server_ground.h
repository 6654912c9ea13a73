#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/host_tables.h>
#include <trireme/strategies/parameter_server/hosts/host_ranks.h>
#include <trireme/strategies/parameter_server/hosts/remote_shares.h>
#include <trireme/strategies/parameter_server/hosts/share_server.h>
#include <trireme/strategies/parameter_server/server_invitation.h>
#include <trireme/strategies/parameter_server/server_memory.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// The per-rank state of a server: rank layout, host memory, this rank's view of the tables, links
// to other hosts.
class TRIREME_API ServerGround {
 public:
  // Collective; throws what ParameterServer's constructor does.
  ServerGround(std::shared_ptr<Communicator> communicator, std::vector<TableSpec> tables,
               const Options& options);
  // Joins a server of this host as one more worker.
  explicit ServerGround(const Invitation& invitation);
  ~ServerGround();
  ServerGround(const ServerGround&) = delete;
  ServerGround& operator=(const ServerGround&) = delete;

  // Returns null for a worker that has joined.
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const HostRanks& ranks() const { return ranks_; }
  const ServerMemory& memory() const { return *memory_; }
  const HostTables& here() const { return here_; }
  // Return the links to other hosts: a worker's to their servers, a serving rank's to their
  // workers. Null on one host, and on a rank of the other kind.
  RemoteShares* remote() const { return remote_.get(); }
  ShareServer* shares() const { return shares_.get(); }
  // Returns the tables by which this rank loads the share of its host; null if another rank loads
  // it.
  const HostTables* loader() const;

 private:
  struct Introduction;
  static std::vector<Introduction> introduce(Communicator& communicator);
  static std::shared_ptr<Communicator> group_for_messages(Communicator& communicator,
                                                          const std::vector<Introduction>& all);

  ServerPlan plan_of(const std::vector<TableSpec>& tables, const Options& options,
                     const BoardPlan& lines, int64_t machine_bytes) const;
  void reach_other_hosts(const std::shared_ptr<ClockBoard>& board,
                         const std::vector<Introduction>& all);
  void make_tables(const std::shared_ptr<ClockBoard>& board, bool moves_no_byte,
                   std::vector<TableSpec> whole);
  void write_first_values(const std::vector<TableSpec>& tables) const;
  at::Tensor first_values(const at::Tensor& own, int64_t source) const;

  std::shared_ptr<Communicator> communicator_;
  HostRanks ranks_;
  std::shared_ptr<const ServerMemory> memory_;
  HostTables here_;
  std::shared_ptr<MessageBox> box_;
  std::shared_ptr<RemoteShares> remote_;
  std::unique_ptr<ShareServer> shares_;
};

}  // namespace trireme::ps
