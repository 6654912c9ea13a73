#pragma once

#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/server_memory.h>
#include <trireme/strategies/parameter_server/worker_tables.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace trireme::ps {

// [Note: a rank that stands for workers of other hosts]
//
// A serving rank has a line on the board and a view of the tables for each worker of another host
// that it serves, as a worker of this host has. A thread per worker performs the worker's requests
// in their order, and waits where a worker would wait. So nothing in the memory of a host knows of
// other hosts, but for a flag in a worker's line.
//
// If a request without an answer fails (a push without memory), all later ones of its worker fail,
// so that the worker gets the error at its next pull. A worker that has died is marked as lost when
// all its requests are done.
//
// To save, all workers meet on each host. The first worker writes the files on its own host; the
// rank that stands for it on another host answers with the tensors of the share.

// Serves the requests of workers of other hosts to the shares of this one.
class TRIREME_API ShardServer {
 public:
  struct Parts {
    std::shared_ptr<MessageBox> box;
    std::shared_ptr<const ServerMemory> memory;
    RankOf where;
    std::chrono::milliseconds limit{};  // of the wait for workers to take the last messages
  };
  struct Worker {
    int64_t number = 0;
    int64_t rank = 0;
    int64_t pid = 0;
  };
  // Takes the lines of these workers, whose memory is reserved. make_tables() follows once all
  // ranks of the host have taken theirs.
  ShardServer(Parts parts, const Options& options, const std::vector<Worker>& workers);
  ~ShardServer();
  ShardServer(const ShardServer&) = delete;
  ShardServer& operator=(const ShardServer&) = delete;

  void make_tables();
  // Returns the tables of the first of these workers; null if there is none.
  const WorkerTables* first_tables() const;
  // Begins to serve: a thread takes messages, and a thread per worker performs its requests.
  void start();
  // Stops, and tells the workers that no more messages come, and the error that ended this rank, if
  // any. Never throws.
  void close(std::string_view error) noexcept;
  // Ends the threads, once all requests that have come are answered; their waits end by an error.
  // Never throws. Any thread may call it.
  void stop() noexcept;

 private:
  class ClientSession;

  void take_messages();
  bool take_arrivals();
  void note_gone();
  void give(int64_t rank, const TensorMessage& message);
  ClientSession* session_of(int64_t rank);

  Parts parts_;
  std::vector<std::unique_ptr<ClientSession>> sessions_;
  std::mutex stopping_;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
};

}  // namespace trireme::ps
