#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/hosts/table_shares.h>
#include <trireme/strategies/parameter_server/table_steps.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::ps {

class WorkerSession;

// Tensors by host; those of a host in the order of Table::share_tensors().
using SharesByHost = std::vector<std::vector<at::Tensor>>;

// The common part of all kinds of tables: a name, a clock, and pushes that wait for their place. A
// table lives as long as its server. Any thread may call the functions for users; see
// worker_lock.h. The other non-const functions are called by the thread that has the worker's lock.
class TRIREME_API Table {
 public:
  // The places of the table's shares, and this worker's link to the shares of other hosts.
  struct Spread {
    int64_t index = 0;  // number of the table in the server
    TableLayout layout = {};
    std::shared_ptr<ShardClient> remote = nullptr;
  };

  virtual ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const std::string& name() const { return spec_->name; }
  // Returns the bytes of the table in the memory of the host: values, states, deposits and lines.
  virtual int64_t memory_bytes() const = 0;
  virtual int64_t count_rows() const { return 0; }

  // Sets the learning rate: under bsp for the step of this clock and all later ones, and if several
  // workers set one in a clock the first worker's counts; else at once, for all workers. Throws
  // ValueError for a negative one, for a sum, and with backup workers.
  void set_lr(double lr);

  // --- the server calls these ---

  virtual void before_clock();
  // Returns whether pushes wait for their place.
  bool has_open_pushes() const { return !open_pushes_.empty(); }
  virtual void after_clock();
  // Moves a module's parameters out of the table's memory.
  virtual void release_module() {}
  virtual const TableSteps& steps() const = 0;

  // --- saving; see table_checkpoint.h ---

  // Performs the kept pushes, and publishes this worker's learning rate.
  void prepare_meeting();
  // Forgets this worker's pushes of the open clock (bsp).
  virtual void drop_pushes();
  void adopt_learning_rate() { own_steps().adopt_learning_rate(); }
  // Applies all committed clocks to the values.
  void bring_to_committed();
  const TableSpec& spec() const { return *spec_; }
  // Returns all tensors that this host keeps of the table. Valid, as the next functions, while all
  // workers stand still.
  virtual std::vector<at::Tensor> share_tensors() const = 0;
  // Returns the number of tensors that a host keeps.
  virtual size_t count_share_tensors(int64_t host) const = 0;
  // Returns the whole table, made of the shares of all hosts; `prefix` stands before the names of
  // its values. On one host nothing is copied.
  virtual CheckpointContent content(const std::string& prefix,
                                    const SharesByHost& shares) const = 0;
  // Returns the content that a checkpoint has to have of the table, without parts. Throws
  // ValueError if the checkpoint cannot fit; changes nothing.
  virtual CheckpointContent expected_of(const CheckpointReader& reader,
                                        const std::string& prefix) const = 0;
  // Makes this host's rows of a checkpoint; called on one rank of the host.
  virtual void make_room(const CheckpointReader& /*reader*/) {}
  // places() returns the tensors of this host's share into which a checkpoint is read as it is;
  // read_rest() reads the others.
  virtual CheckpointContent places(const std::string& prefix) const = 0;
  virtual void read_rest(const CheckpointReader& /*reader*/) {}
  // Called on every worker once the values are loaded.
  virtual void note_loaded();

 protected:
  Table(std::shared_ptr<const TableSpec> spec, std::shared_ptr<ProgressTable> board,
        std::shared_ptr<WorkerSession> session, Spread spread);

  virtual TableSteps& own_steps() = 0;
  ProgressTable& board() const { return *board_; }
  std::shared_ptr<ProgressTable> shared_board() const { return board_; }
  WorkerSession& session() const { return *session_; }
  bool is_bsp() const;
  const Spread& spread() const { return spread_; }
  const TableLayout& layout() const { return spread_.layout; }
  ShardClient* remote() const { return spread_.remote.get(); }
  WaitContext context(std::string_view cause) const;
  // Returns the description of a wait for another host's answer to a pull.
  WaitContext context_of_answer() const;

  // --- pulls ---

  // ask() asks the other hosts, if there are any; have_come() returns whether they have answered.
  RemoteAnswers ask(const ShareRequest& request) const;
  bool have_come(const RemoteAnswers& answers) const;
  // Returns whether a pull of that clock need not wait for another worker.
  bool has_come(uint64_t clock) const;
  // Waits until a pull of that clock may read; under bsp the values are those of that clock then,
  // unless another thread of this worker has ended it meanwhile.
  void wait_for(uint64_t clock);
  // Waits for the open clock. `ask` asks the other hosts for their values of it.
  template <typename Ask>
  void wait_to_read(const Ask& ask) {
    uint64_t clock = 0;
    do {
      clock = board_->clock();
      ask();
      wait_for(clock);
    } while (is_bsp() && board_->clock() != clock);
  }
  // Calls `read` until no clock was committed meanwhile, which only happens with backup workers.
  void read_one_clock(const std::function<void()>& read);
  // Returns a pull that `read` finishes: at once if it need not wait, else in wait(). `has_answers`
  // says whether the other hosts have answered, if they were asked.
  Pending pull_later(std::function<std::vector<at::Tensor>()> read,
                     std::function<bool()> has_answers = {});
  // Returns a finished pull: in a checkpointed function no pull is left for later.
  static Pending pulled(std::vector<at::Tensor> tensors);

  // --- pushes ---

  // Returns whether the place for a push of this clock is free.
  bool can_push() const;
  // Waits until it is.
  void wait_to_push();
  // Waits so, and counts the push; returns false if its clock was committed without this worker, so
  // that it is dropped.
  bool begin_push();
  // Keeps a push whose place is not free: `push`, which waits for no clock, is called in wait(), in
  // the next push, or in clock().
  Pending push_later(std::function<void()> push);
  // Performs the kept pushes, in their order.
  void finish_pushes();

 private:
  class Pull;
  class Pulled;
  class Push;
  struct OpenPush;

  void check_async(uint64_t clock, std::string_view verb) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ProgressTable> board_;
  std::shared_ptr<WorkerSession> session_;
  Spread spread_;
  uint64_t staleness_;
  std::deque<std::shared_ptr<OpenPush>> open_pushes_;
};

}  // namespace trireme::ps
