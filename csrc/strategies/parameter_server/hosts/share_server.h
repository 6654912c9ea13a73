#pragma once

#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/clock_board.h>
#include <trireme/strategies/parameter_server/host_tables.h>
#include <trireme/strategies/parameter_server/server_memory.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace trireme::ps {

// [Note: a rank that stands for workers of other hosts]
//
// For each of some workers of other hosts it has what a worker of this host has: a line on the
// board, and the tables. A thread per worker does what its messages ask for, in their order, and
// waits where a worker would wait. So nothing in the memory of a host knows of other hosts, but
// that a line says so.
//
// A request without an answer that fails (a push without memory) makes all later ones of its worker
// fail, so that the worker hears of it at its next pull. A worker that has gone without a word is
// noted as lost when all that it had sent is done.
//
// To save, all workers meet on each host. There the first of them writes; on its own host it does,
// and elsewhere who stands for it answers with the tensors of the share.

// Does what workers of other hosts ask of the share of this one.
class TRIREME_API ShareServer {
 public:
  struct Parts {
    std::shared_ptr<MessageBox> box;
    std::shared_ptr<const ServerMemory> memory;
    RankOf where;
  };
  struct Worker {
    int64_t number = 0;
    int64_t rank = 0;
    int64_t pid = 0;
  };
  // Takes the lines of these workers, whose memory is reserved. make_tables() follows once all
  // ranks of the host have taken theirs.
  ShareServer(Parts parts, const Options& options, const std::vector<Worker>& workers);
  ~ShareServer();
  ShareServer(const ShareServer&) = delete;
  ShareServer& operator=(const ShareServer&) = delete;

  void make_tables();
  // Returns the tables of the first of these workers; null if there is none.
  const HostTables* first_tables() const;
  // Begins to serve: a thread takes messages, and one per worker does what they ask for.
  void start();
  // Says that nothing more comes from here, and what has ended this rank, if anything has. Never
  // throws.
  void close(std::string_view error) noexcept;
  // Ends that, once what has come is answered; waits of these threads end by an error. Never
  // throws. Any thread may call it.
  void stop() noexcept;

 private:
  class Seat;

  void take_messages();
  void give(int64_t rank, const TensorMessage& message);
  Seat* seat_of(int64_t rank);

  Parts parts_;
  std::vector<std::unique_ptr<Seat>> seats_;
  std::mutex stopping_;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
};

}  // namespace trireme::ps
