#include <trireme/strategies/zero/zero.h>

#include <ATen/ATen.h>

#include <utility>

// How parameters are written outside of a step, and how it is noticed. See [Note: the step of a
// sharded optimizer] in zero.h.

namespace trireme {
namespace {

int64_t version_of(const at::Tensor& one) { return one.is_inference() ? 0 : one._version(); }

}  // namespace

void Zero::snapshot_versions() {
  if (store_) return store_->snapshot_versions(parameters_);
  versions_.clear();
  for (const at::Tensor& parameter : parameters_) versions_.push_back(version_of(parameter));
}

// Private parameters could follow a write on all ranks, but a program must not depend on where it
// runs. A rank alone may do as it likes.
int64_t Zero::changed_outside() const {
  std::vector<int64_t> changed;
  if (store_) changed = store_->changed_outside(parameters_);
  for (size_t i = 0; !store_ && communicator_->world() > 1 && i < parameters_.size(); ++i)
    if (version_of(parameters_[i]) != versions_[i]) changed.push_back(static_cast<int64_t>(i));
  return changed.empty() ? -1 : changed.front();
}

// Copies: what reads before it writes (mul_, and normal_, which writes twice) would meet what
// another rank has written already.
void Zero::begin_writing() {
  const at::NoGradGuard no_grad;
  refuse(meet(look_at_parameters(), "step gate: before writing"));
  writing_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!is_moved(i)) parameters_[i].set_data(places_[i].clone());
}

void Zero::end_writing() {
  const at::NoGradGuard no_grad;
  Flags flags = look_at_parameters();
  if (writing_) flags.changed_parameter = written_unseen();  // versions: that is what this is for
  snapshot_versions();                                       // before a wait that may throw
  try {
    flags = meet(flags, "step gate: written");
  } catch (...) {
    drop_writes();
    throw;
  }
  writing_ = false;
  refuse(flags);
  samples_.clear();
  settle_storages();
  if (!store_) gather_shards();
  snapshot_versions();
  communicator_->barrier("step gate: settled").wait();
  take_samples();
}

void Zero::begin_writing_shards() {
  const at::NoGradGuard no_grad;
  refuse(meet(look_at_parameters(), "step gate: before writing"));
  samples_.clear();
  settle_storages();
}

void Zero::end_writing_shards() {
  const at::NoGradGuard no_grad;
  HostStore::bump_versions(parameters_);
  snapshot_versions();  // before a wait that may throw
  if (!store_) {
    gather_shards();
    snapshot_versions();
  }
  communicator_->barrier("step gate: written").wait();
  take_samples();
}

// What an exception ended was never written.
void Zero::drop_writes() {
  if (!std::exchange(writing_, false)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(places_[i]);
}

}  // namespace trireme
