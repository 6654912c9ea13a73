#include <trireme/common/error.h>
#include <trireme/memory/snapshot.h>
#include <trireme/memory/value_hash.h>
#include <trireme/strategies/zero/zero.h>

#include <ATen/ATen.h>

#include <algorithm>
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
std::vector<int64_t> Zero::changed_outside() const {
  std::vector<int64_t> changed;
  if (store_) changed = store_->changed_outside(parameters_);
  for (size_t i = 0; !store_ && communicator_->world() > 1 && i < parameters_.size(); ++i)
    if (version_of(parameters_[i]) != versions_[i]) changed.push_back(static_cast<int64_t>(i));
  std::erase_if(changed, [&](int64_t index) { return has_own_memory(static_cast<size_t>(index)); });
  return changed;
}

// Compares addresses: nothing else can have that of memory which we hold. A parameter without
// elements has no address, and nothing to disagree about.
bool Zero::has_own_memory(size_t index) const {
  return !own_memory_.empty() && own_memory_[index].defined() &&
         own_memory_[index].const_data_ptr() == parameters_[index].const_data_ptr();
}

void Zero::give_own_memory(const std::vector<int64_t>& parameters) {
  if (communicator_->world() == 1 || writing_) return;
  const at::NoGradGuard no_grad;
  own_memory_.resize(parameters_.size());
  const std::vector<int64_t> changed = changed_outside();
  for (const int64_t parameter : parameters) {
    const auto i = static_cast<size_t>(parameter);
    if (is_moved(i) || !is_fit(i)) continue;
    if (std::binary_search(changed.begin(), changed.end(), parameter)) continue;
    own_memory_[i] = places_[i].clone();
    parameters_[i].set_data(own_memory_[i]);
  }
}

// Compares, per parameter, a number: 0 where it was not moved, else a hash of its values, or 1 if
// any will do. The highest and the lowest of the ranks must be equal. It is a collective only where
// some rank has moved one.
void Zero::agree_on_moved(const Flags& flags, Moved expected) {
  if (flags.moved_parameter < 0) return;
  const auto numel = static_cast<int64_t>(parameters_.size());
  const at::Tensor own = at::zeros({2, numel}, at::kLong);
  auto* told = own.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < numel; ++i) {
    const auto index = static_cast<size_t>(i);
    if (is_moved(index)) {
      const bool by_value = expected == Moved::kSameValues;
      told[i] = by_value ? static_cast<int64_t>(hash_of_values(parameters_[index]) >> 1U | 1U) : 1;
    }
    told[numel + i] = -told[i];  // the highest of which is the lowest
  }
  const at::Tensor transport = own.to(infos_.front().device);
  communicator_->all_reduce({transport}, ReduceOp::kMax, "step gate: other data").wait();
  const at::Tensor highest = transport.cpu();
  const auto* all = highest.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < numel; ++i) {
    if (all[i] == -all[numel + i]) continue;
    const bool on_some = all[numel + i] == 0;
    TORCH_CHECK(false, error_text("zero",
                                  "parameter '" + infos_[static_cast<size_t>(i)].name +
                                      "' was given other data on " +
                                      (on_some ? "some of the ranks only"
                                               : "all ranks, with values that differ between them"),
                                  communicator_->rank_of(),
                                  "Load or assign it on all of them, with the same values."));
  }
}

// Gives each rank copies: an operation that reads before it writes (mul_, and normal_, which writes
// twice) would meet what another rank has written already.
void Zero::begin_writing() {
  const at::NoGradGuard no_grad;
  keep_snapshots_of(parameters_);
  const Flags flags = meet(look_at_parameters(), "step gate: before writing");
  refuse(flags);
  agree_on_moved(flags, writing_ ? Moved::kAnyValues : Moved::kSameValues);
  if (flags.moved_parameter >= 0) {  // also where an exception ends the writing
    samples_.clear();
    copy_back();
    communicator_->barrier("step gate: copied back").wait();
    take_samples();
  }
  writing_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(places_[i].clone());
}

void Zero::end_writing() {
  const at::NoGradGuard no_grad;
  Flags flags = look_at_parameters();
  if (writing_) flags.changed_parameter = written_unseen();  // versions: that is what this is for
  snapshot_versions();                                       // before a wait that may throw
  try {
    flags = meet(flags, "step gate: written");
    refuse(flags);
  } catch (...) {
    drop_writes();
    snapshot_versions();
    throw;
  }
  writing_ = false;
  samples_.clear();
  agree_on_moved(flags, Moved::kAnyValues);
  copy_back();
  if (!store_) gather_shards();
  snapshot_versions();
  communicator_->barrier("step gate: copied back").wait();
  take_samples();
}

void Zero::begin_writing_shards() {
  const at::NoGradGuard no_grad;
  keep_snapshots_of(parameters_);
  const Flags flags = meet(look_at_parameters(), "step gate: before writing");
  refuse(flags);
  samples_.clear();
  agree_on_moved(flags, Moved::kAnyValues);
  copy_back();
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

// Drops copies, so that what an exception ended was never written.
void Zero::drop_writes() {
  if (!std::exchange(writing_, false)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(places_[i]);
  if (reducer_) reducer_->notice_changes();
}

}  // namespace trireme
