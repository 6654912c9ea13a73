#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/strategies/parameter_server/hosts/remote_shares.h>
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

class WorkerDesk;

// Holds tensors by host; those of a host in the order of Table::share_tensors().
using SharesByHost = std::vector<std::vector<at::Tensor>>;

// Is what tables of all kinds have: a name, a clock, and pushes that wait for their place. A table
// lives as long as its server. Any thread may call what users call; see worker_lock.h. The rest is
// called by the thread that has the worker's lock, but for what is const.
class TRIREME_API Table {
 public:
  // Says where the shares of the table are, and how this worker reaches those of other hosts.
  struct Spread {
    int64_t index = 0;  // numbers the table in the server
    TableLayout layout = {};
    std::shared_ptr<RemoteShares> remote = nullptr;
  };

  virtual ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const std::string& name() const { return spec_->name; }
  // Returns the bytes of the table in the memory of the host: values, states, deposits and lines.
  virtual int64_t memory_bytes() const = 0;
  virtual int64_t count_rows() const { return 0; }

  // Sets the learning rate: under bsp for the step of this clock and all later ones, and where
  // several workers set one in a clock the first of them counts; else at once, for all workers.
  // Throws ValueError for a negative one, for a sum, and with backup workers.
  void set_lr(double lr);

  // --- the server calls these ---

  virtual void before_clock();
  virtual void after_clock();
  // Gives what lies in the table's memory memory of its own.
  virtual void release_module() {}
  virtual const TableSteps& steps() const = 0;

  // --- saving; see table_checkpoint.h ---

  // Does what is left of pushes, and says which learning rate holds.
  void prepare_meeting();
  // Forgets what this worker has pushed in the open clock (bsp).
  virtual void drop_pushes();
  void settle_learning_rate() { own_steps().settle_learning_rate(); }
  // Brings the values to the clocks that are closed.
  void bring_to_closed();
  const TableSpec& spec() const { return *spec_; }
  // Returns all that this host keeps of it. Valid, like what follows, while all workers stand
  // still.
  virtual std::vector<at::Tensor> share_tensors() const = 0;
  // Returns how many tensors those of a host are.
  virtual size_t count_share_tensors(int64_t host) const = 0;
  // Returns the whole table, of the shares of all hosts; `prefix` stands before the names of its
  // values. On one host nothing is copied.
  virtual CheckpointContent content(const std::string& prefix,
                                    const SharesByHost& shares) const = 0;
  // Returns what a checkpoint has to hold of it, without parts. Throws ValueError where that cannot
  // be; changes nothing.
  virtual CheckpointContent expected_of(const CheckpointReader& reader,
                                        const std::string& prefix) const = 0;
  // Makes what a checkpoint holds of this host's share; on one worker of the host.
  virtual void make_room(const CheckpointReader& /*reader*/) {}
  // Returns the places of this host's share that a checkpoint is read into as it is, and reads the
  // rest.
  virtual CheckpointContent places(const std::string& prefix) const = 0;
  virtual void read_rest(const CheckpointReader& /*reader*/) {}
  // Says that others have loaded the values; on every worker.
  virtual void note_loaded();

 protected:
  Table(std::shared_ptr<const TableSpec> spec, std::shared_ptr<ClockBoard> board,
        std::shared_ptr<WorkerDesk> desk, Spread spread);

  virtual TableSteps& own_steps() = 0;
  ClockBoard& board() const { return *board_; }
  std::shared_ptr<ClockBoard> shared_board() const { return board_; }
  WorkerDesk& desk() const { return *desk_; }
  bool is_bsp() const;
  const Spread& spread() const { return spread_; }
  const TableLayout& layout() const { return spread_.layout; }
  RemoteShares* remote() const { return spread_.remote.get(); }
  Errand errand(std::string_view cause) const;
  // Returns that of a wait for what another host answers to a pull.
  Errand errand_of_answer() const;

  // --- pulls ---

  // Asks the other hosts, where there are any, and says whether they have answered.
  RemoteAnswers ask(const ShareRequest& request) const;
  bool have_come(const RemoteAnswers& answers) const;
  // Says whether a pull of that clock need not wait for another worker.
  bool has_come(uint64_t clock) const;
  // Waits until a pull of that clock may read; under bsp the values are those of that clock then,
  // unless another thread of this worker has ended it meanwhile.
  void wait_for(uint64_t clock);
  // Waits for the open clock. `ask` asks the other hosts for what they have in it.
  template <typename Ask>
  void wait_to_read(const Ask& ask) {
    uint64_t clock = 0;
    do {
      clock = board_->clock();
      ask();
      wait_for(clock);
    } while (is_bsp() && board_->clock() != clock);
  }
  // Calls `read` until no clock was closed meanwhile, which can be with backup workers only.
  void read_one_clock(const std::function<void()>& read);
  // Returns a pull that `read` finishes: at once where it need not wait, else in wait().
  // `has_answers` says whether the other hosts have answered, for those who were asked.
  Pending pull_later(std::function<std::vector<at::Tensor>()> read,
                     std::function<bool()> has_answers = {});
  // Returns a pull that is over. In a checkpoint none is left for later.
  static Pending pulled(std::vector<at::Tensor> tensors);

  // --- pushes ---

  // Says whether a push of this clock finds its place free.
  bool can_push() const;
  // Waits until it does.
  void wait_to_push();
  // Does that, and counts the push; false where its clock was closed without this worker, so that
  // it is dropped.
  bool begin_push();
  // Returns a push whose place is not free: `push`, which waits for no clock, follows in wait(), in
  // the next push, or in clock().
  Pending push_later(std::function<void()> push);
  // Does pushes that are kept, in their order.
  void finish_pushes();

 private:
  class Pull;
  class Pulled;
  class Push;
  struct OpenPush;

  void check_async(uint64_t clock, std::string_view verb) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ClockBoard> board_;
  std::shared_ptr<WorkerDesk> desk_;
  Spread spread_;
  uint64_t staleness_;
  std::deque<std::shared_ptr<OpenPush>> open_pushes_;
};

}  // namespace trireme::ps
