#include <trireme/comm/foreign_error.h>
#include <trireme/strategies/fsdp/fsdp.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

// What the user says of gradients, unit by unit, and of memory: for the reducers of all units.

namespace trireme {

void Fsdp::set_synchronize(const std::vector<bool>& groups) {
  synchronize_ = std::find(groups.begin(), groups.end(), true) != groups.end();
  std::vector<bool> held = groups;
  for (size_t i = 0; i < groups.size(); ++i) held[i] = synchronize_ && !groups[i];
  reducers_.hold(held);
  reducers_.set_synchronize(synchronize_ && !manual_);
}

void Fsdp::set_all_reduce(const std::vector<bool>& groups) {
  std::vector<bool> deferred = groups;
  deferred.flip();
  reducers_.defer_all_reduce(deferred);
}

// Ranks on which it did not raise go on to their next step, and wait there for this one.
AllReduceHook Fsdp::told_of_errors(AllReduceHook hook) {
  return [self = weak_from_this(), hook = std::move(hook)](at::Tensor& gradients) {
    try {
      hook(gradients);
    } catch (const std::exception& error) {
      const auto alive = self.lock();
      if (alive && alive->communicator_->world() > 1) {
        const std::string what = "an all-reduce hook raised: " + first_line_of(error);
        alive->reducers_.announce_failure(alive->abandoned_text(what));
        alive->tell_gatherers(what);
      }
      throw;
    }
  };
}

void Fsdp::set_all_reduce_hooks(std::vector<AllReduceHook> groups) {
  for (AllReduceHook& hook : groups)
    if (hook) hook = told_of_errors(std::move(hook));
  reducers_.set_all_reduce_hooks(groups);
}

void Fsdp::set_memory_sources(BufferPool::Source gathered, const BufferPool::Source& gradients) {
  pool_->set_source(std::move(gathered));
  reducers_.set_memory_source(gradients);
}

void Fsdp::set_divide_factors(const std::vector<double>& groups) {
  reducers_.set_divide_factors(groups);
}

}  // namespace trireme
