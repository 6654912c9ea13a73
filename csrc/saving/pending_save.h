#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace trireme {

struct SaveInFlight;  // save_in_flight.h

// A save that may still be going on. Copies are the same save; dropping them cancels nothing. The
// default one is no save, and done. Thread-safe.
class TRIREME_API PendingSave {
 public:
  PendingSave() = default;
  explicit PendingSave(std::shared_ptr<SaveInFlight> save) : save_(std::move(save)) {}

  // Returns when the checkpoint is on the disk and has taken its place. Throws what the save has,
  // on all ranks, with the rank and its cause; the previous checkpoint is still there then. Throws
  // ValueError in a child that a process with a save in flight has forked.
  void wait() const;
  // The same; returns false if `timeout` is over before, and the save goes on.
  bool wait_for(std::chrono::milliseconds timeout) const;
  // Returns whether it has ended, well or not.
  bool done() const;

  // Returns how long threads of this rank have been held so far, by the call and by writes of what
  // was not on its way yet.
  double stall_ms() const;
  // Returns the bytes of tensors that this rank has written; 0 before the end.
  int64_t written_bytes() const;
  const std::string& path() const;

 private:
  std::shared_ptr<SaveInFlight> save_;
};

}  // namespace trireme
