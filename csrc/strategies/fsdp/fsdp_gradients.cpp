#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/strategies/fsdp/fsdp.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

// What the user says of gradients, unit by unit, and of memory: for the reducers of all units; and
// what is said to a user who changes them.

// [Note: gradients that a rank scales alone]
//
// LibTorch's clip_grad_norm_ knows nothing of shards: each rank would clip by the norm of its own,
// and it writes through `.data()`, which no version tells. So samples of each gradient are kept
// when it is delivered, and each rank tells at the gate by which one factor all of them have been
// multiplied since. Factors that differ are refused on all ranks of the host. A rank says nothing
// that has no samples, or changed them in another way: by element (clip_grad_value_, noise), or by
// parameter. What all ranks scale alike passes: model->clip_grad_norm_, the inverse of a loss
// scale.

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

// Tells the others of an exception in a hook: ranks on which it did not raise go on to their next
// step, and wait there for this one.
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

void Fsdp::keep_gradients() {
  reducers_.set_delivered_callback(
      [self = weak_from_this()](const std::vector<int64_t>& parameters) {
        const auto alive = self.lock();
        if (!alive) return;
        std::vector<int64_t> offloaded;
        for (const int64_t parameter : parameters) {
          if (alive->is_offloaded(parameter)) offloaded.push_back(parameter);
          alive->delivered_.read(static_cast<size_t>(parameter), alive->gradient_memory(parameter));
        }
        if (!offloaded.empty()) alive->receive_gradients(offloaded);
      });
}

// Returns nothing where there is no gate at which ranks could compare.
SampledMemory Fsdp::gradient_memory(int64_t parameter) const {
  const Owner& owner = owners_[static_cast<size_t>(parameter)];
  if (owner.group->gathers() || owner.group->communicator()->world() == 1) return {};
  return SampledMemory::of(param_of(owner).gradient_leaf().grad());
}

FactorRange Fsdp::gradient_factor() const {
  CommonFactor factor;
  for (size_t i = 0; i < owners_.size(); ++i)
    delivered_.compare(i, gradient_memory(static_cast<int64_t>(i)), factor);
  return factor.range();
}

void Fsdp::check_factor(const FactorRange& own, const FactorRange& of_all) const {
  if (!of_all.is_empty()) return;
  const std::string here =
      own == FactorRange{} ? "" : ", here by " + std::to_string((own.least + own.most) / 2);
  TORCH_CHECK(
      false,
      error_text("fully_shard",
                 "gradients were multiplied by factors that differ between the ranks" + here +
                     ", as torch::nn::utils::clip_grad_norm_ does, which sees the norm of a "
                     "rank's shards only",
                 communicator_->rank_of(),
                 "Clip with model->clip_grad_norm_(max_norm), then do this backward and "
                 "step again."));
}

void Fsdp::set_divide_factors(const std::vector<double>& groups) {
  reducers_.set_divide_factors(groups);
}

}  // namespace trireme
