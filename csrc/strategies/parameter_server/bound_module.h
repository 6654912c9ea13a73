#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/table_memory.h>
#include <trireme/strategies/parameter_server/worker_meeting.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::ps {

// [Note: parameters in the memory of a table]
//
// Under bsp without backup the parameters of a module on the CPU are the values of the table: no
// pull moves a byte. That works because a clock is committed only when all workers have clocked it:
// a worker that has pulled keeps the values as they are until its own clock(), which says that it
// reads them no more and bumps their versions, so that a graph kept over it raises as torch's own
// does. Between clock() and the next pull() others write; a worker that reads then may see half a
// step. Python's modules refuse a forward; C++ has no hook for that.
//
// Any other write to such a parameter, by torch's own optimizer say, changes it for all workers.
// The next verb notices a write in place by its version. Intended writes go between begin_writing()
// and end_writing(): each worker then writes a copy of its own, and the first worker's become
// everybody's.

// Binds parameters to the values of a table. Called by the thread that has the worker's lock.
class TRIREME_API BoundModule {
 public:
  struct Parts {
    std::string table;
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    std::shared_ptr<HostStore> store;
    std::shared_ptr<ProgressTable> board;
    const TableMemory& memory;
  };
  // Moves the parameters into the store, which has to hold its values already.
  explicit BoundModule(Parts parts);

  // Returns whether this worker has pulled since its last clock.
  bool is_readable() const { return is_readable_; }
  // Throws RuntimeError if a parameter was written in place, or was given other memory. A write in
  // place is reported once.
  void check_unchanged(std::string_view verb);
  void begin_reading() { is_readable_ = true; }
  // Bumps the version of each parameter, since other workers may write it from now on.
  void end_reading();
  // Gives the parameters memory of their own with the values as they are.
  void unbind();
  // Copies the values once more into parameters that were unbound.
  void refresh();

  // See [Note: parameters in the memory of a table]. begin_writing() waits for all live workers,
  // and then calls `prepare`, which applies all clocks; throws ValueError if workers are at
  // different clocks. end_writing() throws DistBackendError if a worker left the writing by an
  // exception.
  void begin_writing(const std::function<void()>& prepare);
  void end_writing();
  // Drops what this worker wrote; the other workers raise. Never throws.
  void abandon_writing(const std::string& reason) noexcept;
  bool is_writing() const { return is_writing_; }

 private:
  WaitContext context() const;
  void refuse_joined() const;
  void check_written();
  void show_values();
  void finish_writing();

  Parts parts_;
  WorkerMeeting meeting_;           // of workers that write
  std::vector<at::Tensor> places_;  // over the store
  bool is_readable_ = true;
  bool is_writing_ = false;
};

}  // namespace trireme::ps
