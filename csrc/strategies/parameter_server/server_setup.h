#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/hosts/host_ranks.h>
#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/hosts/shard_server.h>
#include <trireme/strategies/parameter_server/server_invitation.h>
#include <trireme/strategies/parameter_server/server_memory.h>
#include <trireme/strategies/parameter_server/worker_tables.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// The per-rank state of a server: rank layout, host memory, this rank's view of the tables, links
// to other hosts.
class TRIREME_API ServerSetup {
 public:
  // Collective; throws what ParameterServer's constructor does.
  ServerSetup(std::shared_ptr<Communicator> communicator, std::vector<TableSpec> tables,
              const Options& options);
  // Joins a server of this host as one more worker.
  explicit ServerSetup(const Invitation& invitation);
  ~ServerSetup();
  ServerSetup(const ServerSetup&) = delete;
  ServerSetup& operator=(const ServerSetup&) = delete;

  // Returns null for a worker that has joined.
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const HostRanks& ranks() const { return ranks_; }
  const ServerMemory& memory() const { return *memory_; }
  const WorkerTables& here() const { return here_; }
  // Return the links to other hosts: a worker's to their servers, a serving rank's to their
  // workers. Null on one host, and on a rank of the other kind.
  ShardClient* remote() const { return remote_.get(); }
  ShardServer* shares() const { return shares_.get(); }
  // Returns the tables by which this rank loads the share of its host; null if another rank loads
  // it.
  const WorkerTables* loader() const;

 private:
  struct Introduction;
  static std::vector<Introduction> introduce(Communicator& communicator);
  static std::shared_ptr<Communicator> group_for_messages(Communicator& communicator,
                                                          const std::vector<Introduction>& all);

  ServerPlan plan_of(const std::vector<TableSpec>& tables, const Options& options,
                     const BoardPlan& lines, int64_t machine_bytes) const;
  void reach_other_hosts(const std::shared_ptr<ProgressTable>& board,
                         const std::vector<Introduction>& all);
  void make_tables(const std::shared_ptr<ProgressTable>& board, bool moves_no_byte,
                   std::vector<TableSpec> whole);
  void write_first_values(const std::vector<TableSpec>& tables) const;
  at::Tensor first_values(const at::Tensor& own, int64_t source) const;

  std::shared_ptr<Communicator> communicator_;
  HostRanks ranks_;
  std::shared_ptr<const ServerMemory> memory_;
  WorkerTables here_;
  std::shared_ptr<MessageBox> box_;
  std::shared_ptr<ShardClient> remote_;
  std::unique_ptr<ShardServer> shares_;
};

}  // namespace trireme::ps
