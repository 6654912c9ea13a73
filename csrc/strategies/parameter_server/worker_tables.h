#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/server_memory.h>
#include <trireme/strategies/parameter_server/table.h>

#include <functional>
#include <memory>
#include <vector>

namespace trireme::ps {

class ShardClient;
class WorkerSession;
class WorkerMeeting;

// One worker's, or serving rank's, view of a server: its progress line and its tables. Called by
// the thread that has the worker's lock.
struct TRIREME_API WorkerTables {
  std::shared_ptr<ProgressTable> board;
  std::shared_ptr<WorkerSession> session;
  std::shared_ptr<WorkerMeeting> meeting;
  std::vector<std::shared_ptr<Table>> tables;

  // Ends the worker's clock, after its kept pushes.
  void clock();
};

struct HostTablesRequest {
  std::shared_ptr<const ServerMemory> memory;
  std::shared_ptr<ProgressTable> board;
  bool moves_no_byte = false;  // modules are bound
  // With several hosts: the whole tables, of which the memory has shares.
  std::vector<std::shared_ptr<const TableSpec>> whole = {};
  std::shared_ptr<ShardClient> remote = nullptr;
};

// Makes the tables, and lets the board name what a dead worker held of them.
TRIREME_API WorkerTables make_host_tables(const HostTablesRequest& request);
// Lets the first live worker do `work`, as WorkerMeeting does, once pushes are done and all
// committed clocks are in the values.
void save_together(const WorkerTables& tables, const std::function<void()>& work);
// Makes the store over a host's share of a dense table.
std::shared_ptr<HostStore> store_of(const ServerMemory& memory, size_t table);

}  // namespace trireme::ps
