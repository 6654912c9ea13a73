#include <trireme/saving/pending_save.h>

#include <trireme/saving/save_in_flight.h>

#include <c10/util/Exception.h>

namespace trireme {

void PendingSave::wait() const {
  while (!wait_for(std::chrono::hours(1))) {
  }
}

bool PendingSave::wait_for(std::chrono::milliseconds timeout) const {
  if (!save_) return true;
  std::unique_lock<std::mutex> lock(save_->mutex);
  TORCH_CHECK_VALUE(save_->is_done || save_->born == forks_so_far(),
                    error_text("saving",
                               "got a wait for the save to '" + save_->path +
                                   "' in a forked child, expected it in the process that saves",
                               save_->where, "Wait before the fork, or in the parent."));
  if (!save_->ended.wait_for(lock, timeout, [&] { return save_->is_done; })) return false;
  if (!save_->error) return true;
  save_->is_fetched = true;
  std::rethrow_exception(save_->error);
}

bool PendingSave::done() const {
  if (!save_) return true;
  const std::lock_guard<std::mutex> lock(save_->mutex);
  return save_->is_done;
}

double PendingSave::stall_ms() const {
  if (!save_) return 0;
  const double held =
      save_->snapshot ? static_cast<double>(save_->snapshot->stalled_ns()) / 1e6 : 0.0;
  return save_->call_ms + held;
}

int64_t PendingSave::written_bytes() const {
  if (!save_) return 0;
  const std::lock_guard<std::mutex> lock(save_->mutex);
  return save_->written_bytes;
}

const std::string& PendingSave::path() const {
  static const std::string none;
  return save_ ? save_->path : none;
}

}  // namespace trireme
