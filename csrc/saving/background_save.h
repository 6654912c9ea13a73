#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/pending_save.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: a save beside training]
//
// The call notes which tensors are saved (memory/snapshot.h) and starts a thread, which does what a
// synchronous save does: the ranks agree, write and commit, over a communicator of their own. So
// the call waits for no other rank, but for the first one of a group, which makes that
// communicator.
//
// One save of a caller is in flight: the next one waits for it, and raises its error if nobody has
// fetched that. A rank that cannot save begins a save all the same, which tells the others why.

struct BackgroundSave {
  std::string path;
  // What forwards and backwards write (buffers, codes) must be copies.
  CheckpointContent content;
  int64_t max_file_bytes = int64_t{5'000'000'000};
  // The tensors whose announced writes are writes of the content, too: parameters.
  std::vector<at::Tensor> written = {};
  // Called before the ranks agree, on the thread that saves; collective. May be empty.
  std::function<void(const CheckpointRanks&)> check = {};
  // Called on this rank when the checkpoint has taken its place; must not throw. May be empty.
  std::function<void()> after = {};
  // Why this rank cannot save; null: it can.
  std::exception_ptr failure = nullptr;
  double stall_ms = 0;  // the time that the caller has spent on it so far
};

class CheckpointSeries;
// Makes a save one of a numbered checkpoint (checkpoint_series.h): it makes room for it before, and
// deletes old ones after. `rank` 0 does.
TRIREME_API void save_as_step(BackgroundSave& save, std::shared_ptr<CheckpointSeries> series,
                              int64_t step, int64_t rank);

// Returns the communicator that saves of these ranks go over, for save_in_background(); null if
// the engine can make none, and for a single rank. Collective the first time.
TRIREME_API std::shared_ptr<Communicator> communicator_of_saves(const CheckpointRanks& ranks);

// Waits for the saves that this thread, or these ranks, have in flight. Throws the error of an
// earlier one that nobody has fetched.
TRIREME_API void wait_for_earlier_saves(const CheckpointRanks& ranks);

// Begins a save that goes over `saver`, made by communicator_of_saves() of `ranks`, or null for a
// single rank. wait_for_earlier_saves() comes before.
TRIREME_API PendingSave save_in_background(BackgroundSave save, const CheckpointRanks& ranks,
                                           std::shared_ptr<Communicator> saver);

// Returns a synchronous save, which is done.
TRIREME_API PendingSave finished_save(std::string path, int64_t written_bytes, double stall_ms);

// Waits for all saves of this process, and logs, on rank 0 of each, errors that nobody has fetched.
TRIREME_API void finish_saves() noexcept;
// Gives up all saves of this process that have not committed yet, and tells the other ranks why.
TRIREME_API void abort_saves(const std::string& reason) noexcept;

}  // namespace trireme
