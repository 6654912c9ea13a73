#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_reader.h>
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

// Is what tables of all kinds have: a name, a clock, and pushes that wait for their place. A table
// lives as long as its server; the server's rules for threads hold.
class TRIREME_API Table {
 public:
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
  // Returns where what it holds lies; `prefix` stands before the names of its values. Valid while
  // all workers stand still.
  virtual CheckpointContent places(const std::string& prefix) const = 0;
  // Returns what a checkpoint has to hold of it, without places. Throws ValueError where that
  // cannot be; changes nothing.
  virtual CheckpointContent expected_of(const CheckpointReader& /*reader*/,
                                        const std::string& prefix) const {
    return places(prefix);
  }
  // Makes what a checkpoint holds of it, so that places() has it all; on one worker.
  virtual void make_room(const CheckpointReader& /*reader*/) {}
  // Says that others have loaded the values; on every worker.
  virtual void note_loaded();

 protected:
  Table(std::shared_ptr<const TableSpec> spec, std::shared_ptr<ClockBoard> board,
        std::shared_ptr<WorkerDesk> desk);

  virtual TableSteps& own_steps() = 0;
  ClockBoard& board() const { return *board_; }
  std::shared_ptr<ClockBoard> shared_board() const { return board_; }
  WorkerDesk& desk() const { return *desk_; }
  bool is_bsp() const;
  Errand errand(std::string_view cause) const;

  // --- pulls ---

  // Says whether a pull of that clock need not wait for another worker.
  bool has_come(uint64_t clock) const;
  // Waits until a pull of that clock may read; under bsp the values are those of that clock then.
  void wait_for(uint64_t clock);
  // Calls `read` until no clock was closed meanwhile, which can be with backup workers only.
  void read_one_clock(const std::function<void()>& read);
  // Returns a pull that `read` finishes: at once where it need not wait, else in wait().
  Pending pull_later(std::function<std::vector<at::Tensor>()> read);

  // --- pushes ---

  // Says whether a push of this clock finds its place free.
  bool can_push() const;
  // Waits for the place of a push; false where its clock was closed without this worker, so that it
  // is dropped.
  bool begin_push(const Errand& errand);
  // Returns a push whose place is not free: `push` follows in wait(), in the next push, or in
  // clock().
  Pending push_later(std::function<void()> push);
  // Does pushes that are kept, in their order.
  void finish_pushes();

 private:
  class Pull;
  class Push;
  struct OpenPush;

  void check_async(uint64_t clock, std::string_view verb) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ClockBoard> board_;
  std::shared_ptr<WorkerDesk> desk_;
  uint64_t staleness_;
  std::deque<std::shared_ptr<OpenPush>> open_pushes_;
};

}  // namespace trireme::ps
