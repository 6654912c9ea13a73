#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/dense_table.h>
#include <trireme/strategies/parameter_server/options.h>
#include <trireme/strategies/parameter_server/sparse_table.h>
#include <trireme/strategies/parameter_server/table_spec.h>
#include <trireme/strategies/parameter_server/worker_tables.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Store;
}

namespace trireme::ps {

class ServerSetup;

// A snapshot of the progress of a server and its workers.
struct Stats {
  std::vector<int64_t> clocks;          // one per worker; the last one of a worker that is gone
  std::optional<int64_t> slowest = {};  // the first of the slowest live workers
  std::vector<int64_t> left = {};       // workers that have left
  std::vector<int64_t> lost = {};       // workers found dead, or ended by an error
  std::map<std::string, double> waited = {};  // seconds of this rank, by cause
  int64_t pulls = 0;                          // this worker's, as the next four
  int64_t pushes = 0;
  int64_t dropped = 0;  // pushes of clocks that were committed without this worker
  int64_t bytes_pulled = 0;
  int64_t bytes_pushed = 0;
  int64_t torn = 0;  // blocks that any worker died in
  std::vector<std::string> torn_blocks = {};
  int64_t memory_bytes = 0;  // of all tables, once per host
  int64_t rows = 0;          // of all sparse tables
};

// Keeps tables of parameters that workers pull and push, each at its own pace. On each host the
// memory is the server: tables, states of optimizers and clocks lie in memory that all ranks of the
// host map, and workers apply pushes themselves, without a process, thread or message in between.
// Several hosts keep a share of each table; see [Note: a table on several hosts] in
// hosts/table_shares.h.
//
//   trireme::Context ctx = trireme::init();
//   namespace ps = trireme::ps;
//   ps::ParameterServer server(ctx, {ps::dense("net", net, ps::SGD{.lr = 0.1})},
//                              {.mode = ps::Mode::kSsp, .staleness = 2});
//   ps::DenseTable& table = server.dense("net");
//   for (const Batch& batch : *loader) {
//     table.pull();
//     loss_of(net->forward(batch)).backward();
//     table.push();
//     server.clock();
//   }
//
// A worker's clock is the number of its clock() calls. There are W workers, and the staleness s is
// the server's or a table's own.
// - bsp: pushes of clock c are kept apart by worker. The clock is committed when all workers have
//   clocked it; then they are added in the order of worker numbers, divided by W (or not,
//   Reduction::kSum), and the optimizer makes one step. A pull at clock c returns the result of c
//   steps; pushes of the open clock, the worker's own too, are not in it. It waits for the slowest
//   worker. A push waits while the clock before the last one is not applied. With whole-number
//   gradients this is synchronous SGD bit for bit; with others the bits are those of that order of
//   sums, whichever worker came first.
// - bsp with backup workers k: a clock is committed when all but k workers have clocked it, and the
//   mean is over the workers that have. A push for a committed clock is dropped and counted;
//   clock() takes the late worker to the present one, and until then its pulls return the present
//   values.
// - ssp: a push is a step of its own, taken when it comes, undivided. A pull at clock c waits until
//   the slowest worker has clock >= c - s. It sees every push made in clocks < c - s and all of the
//   worker's own, perhaps newer ones, and all that an earlier pull saw. clock() never waits. s = 0
//   is not bsp: newer pushes may be seen.
// - async: as ssp, and a pull never waits.
// Several pushes of one clock add up under bsp, and are several steps under ssp and async. A tensor
// for which no worker has pushed is not stepped, and its step is not counted. Under ssp and async
// the result of a pull is consistent per element only: others may step while it copies.
//
// Memory, once per host: the tables and the states of their optimizers, and under bsp two deposits
// of a table per worker. A pull moves the bytes of a table once, or none (DenseTable), a push once.
//
// Faults: a wait ends at the deadline, naming the missing worker. If a worker dies, the next wait
// or pull of another worker names it within a second (WorkerLoss::kRaise), or the others go on as
// if it had left: its pushes of the open clock are dropped. A block of values in which it died
// stays as it is and is counted in stats(). Nothing after the construction is collective, but for
// load(), save() and writing().
//
// Any thread may use the server and its tables; threads of a worker take turns, and share its
// clock. Their pushes of one clock add up; under bsp in the order in which they came. A thread that
// waits for other workers lets the worker's other threads in, but in save(), load() and writing().
// close() and leave() end the waits of other threads by an error. Tables live as long as the
// server. Errors are c10::ValueError for a caller's mistake, c10::IndexError for an unknown table,
// c10::Error for use after close(), leave() or a fork, c10::DistBackendError for the rest.
class TRIREME_API ParameterServer {
 public:
  // Collective. The ranks must have the same tables and options; worker 0's values count. Throws
  // ValueError on all ranks if they differ, if something is out of range, if ranks do not share the
  // memory of their host, or if one of several hosts has no rank that serves; DistBackendError if
  // there is not enough memory.
  ParameterServer(Context& ctx, std::vector<TableSpec> tables, const Options& options = {});
  ParameterServer(std::shared_ptr<Communicator> communicator, std::vector<TableSpec> tables,
                  const Options& options = {});
  // Closes the server. An exception in flight counts as the error of this worker.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  // Returns the number of this worker; absent on a rank that only serves.
  std::optional<int64_t> worker() const;
  int64_t workers() const;

  // Ends this worker's clock and returns the number of the next one. Does not wait, but under bsp
  // while the clock before the last one is not applied, if a push of push_async() is still open or
  // set_lr() was called in one of the last three clocks. If a module's parameters lie in a table's
  // memory, this worker must not read them until the next pull. Throws what DenseTable::pull()
  // throws for a parameter that was written.
  int64_t clock();
  // Returns the clock of each worker; the last one of a worker that is gone.
  std::vector<int64_t> clocks() const;
  Stats stats() const;

  // On a rank that only serves: returns when all workers have left. On one host it only watches
  // meanwhile; on several it serves the requests of workers of other hosts, by a thread per worker.
  // Throws DistBackendError, under kRaise, when a worker has died or was ended by an error.
  void serve();
  // Takes this worker out, so that no other waits for it; pushes of its open clock are dropped. The
  // parameters of modules get memory of their own. Does nothing on a rank that only serves, and
  // when called again.
  void leave();
  // Leaves for good; `error` says what ended this worker, if an error did: then the others raise,
  // under kRaise. Does nothing when called again. Not collective. Throws, as leave() does, what a
  // signal handler has raised meanwhile (Interruption), and nothing else; even then all is closed.
  void close(std::string_view error = {});

  // Saves all tables, with the states of their optimizers, into a folder as save_checkpoint() does;
  // see [Note: a server in a checkpoint] in table_checkpoint.h. Called on all live workers, under
  // bsp without backup at one clock; the first of them writes. Pushes of the open clock are not in
  // it. If saving fails on one worker, that one throws its error (ValueError, c10::Error), and the
  // others DistBackendError with its text. On several hosts shares go to the worker that writes.
  void save(const std::string& path);
  // Loads a checkpoint of a server of the same tables, with any number of workers and servers.
  // Collective over all ranks, before serve(), at one clock. Clocks go on from where they are;
  // pushes of the open clock are dropped, and learning rates are those of the checkpoint. On
  // several hosts the server must be unused. Modules have the values after the next pull(). Throws
  // ValueError for a checkpoint of other tables. A failure while it reads leaves tables half read.
  void load(const std::string& path);

  // Writes into a Store where the tables are, for processes that join(). Returns at once. Such
  // processes are of this host and this user, and find the tables as long as this process lives;
  // workers that have joined stay. A Store holds one such invitation. Throws RuntimeError if this
  // host lets no process open the memory of another.
  void accept(const c10::intrusive_ptr<c10d::Store>& store);
  // Joins a server by the invitation of accept() in the Store, for which it waits as long as the
  // Store's timeout: as the next worker number, at the slowest clock (bsp: the open one). At most
  // 64 workers join. There is no group: nothing is collective, load() and serve() are refused, and
  // every dense table is one of tensors, since the module of a table is in other processes. Throws
  // ValueError if no more can join or the invitation is not of this version of Trireme,
  // DistBackendError if the memory cannot be opened.
  static std::unique_ptr<ParameterServer> join(const c10::intrusive_ptr<c10d::Store>& store);

  // Returns the tables' names, in their order.
  std::vector<std::string> table_names() const;
  bool is_sparse(std::string_view name) const;
  // Return a table. Throw IndexError for an unknown name, and for a table of the other kind. A
  // shared table may outlive the server: then it is closed.
  DenseTable& dense(std::string_view name);
  SparseTable& sparse(std::string_view name);
  std::shared_ptr<SparseTable> shared_sparse(std::string_view name);

 private:
  explicit ParameterServer(std::unique_ptr<ServerSetup> setup);

  void refuse_without_group(std::string_view verb) const;
  void check_buffers_known() const;
  std::vector<SharesByHost> shares_by_host(const RemoteAnswers& answers,
                                           const WaitContext& context);
  void check_may_load() const;
  void check_clocks() const;
  std::shared_ptr<Table> find(std::string_view name, std::string_view verb) const;
  [[noreturn]] void refuse_kind(std::string_view name, const char* got, const char* expected);
  std::exception_ptr release_modules() noexcept;

  std::unique_ptr<ServerSetup> setup_;
  WorkerTables here_;
  std::string ended_by_;  // the error that serve() has thrown
};

}  // namespace trireme::ps
