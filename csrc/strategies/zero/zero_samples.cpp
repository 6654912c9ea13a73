#include <trireme/strategies/zero/zero.h>

#include <bit>
#include <limits>

// Finds writes that no version tells: through `.data`, to parameters and gradients. See [Note: the
// step of a sharded optimizer] in zero.h, and [Note: samples] in memory/tensor_samples.h.

namespace trireme {

// Samples the parameters as they lie in the store, or privately; also while each rank writes a
// copy.
void Zero::take_samples() {
  if (communicator_->world() == 1) return;  // one rank may do as it likes
  for (size_t i = 0; i < places_.size(); ++i) samples_.read(i, SampledMemory::of(places_[i]));
}

// Returns the first parameter that was written unseen, or -1.
int64_t Zero::written_unseen() const {
  for (size_t i = 0; i < places_.size(); ++i)
    if (samples_.is_changed(i, SampledMemory::of(places_[i]))) return static_cast<int64_t>(i);
  return -1;
}

// Torch's clip_grad_norm_ for C++ writes through `.data()`, by the norm of what this rank owns.
void Zero::watch_gradients() {
  delivered_ = std::make_shared<TensorSamples>();
  if (communicator_->world() == 1) return;
  reducer_->set_delivered_callback([this, alive = std::weak_ptr<TensorSamples>(delivered_)](
                                       const std::vector<int64_t>& parameters) {
    const auto delivered = alive.lock();
    if (!delivered) return;  // then this is gone, too
    for (const int64_t parameter : parameters)
      delivered->read(static_cast<size_t>(parameter),
                      gradient_memory(static_cast<size_t>(parameter)));
  });
}

SampledMemory Zero::gradient_memory(size_t index) const {
  const at::Tensor& grad = parameters_[index].grad();
  if (!grad.defined() || !grad.is_contiguous()) return {};
  return SampledMemory::of(grad).part(own(index).begin, own(index).numel);
}

FactorRange Zero::gradient_factor() const {
  CommonFactor factor;
  for (size_t i = 0; i < parameters_.size(); ++i)
    delivered_->compare(i, gradient_memory(i), factor);
  return factor.range();
}

// Maps numbers such that the order of the results is that of the numbers.
int64_t Zero::in_order(double number) {
  const auto bits = std::bit_cast<int64_t>(number);
  return bits < 0 ? bits ^ std::numeric_limits<int64_t>::max() : bits;
}

}  // namespace trireme
