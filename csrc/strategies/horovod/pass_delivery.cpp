#include <trireme/strategies/horovod/pass_delivery.h>

#include <trireme/common/language.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace trireme::horovod {

void PassDelivery::begin(BucketLayout& layout) {
  WholeDelivery::begin(layout);
  const size_t count = layout.parameters().size();
  if (is_reduced_.size() == count) return;  // begun anew in the middle of a step
  passes_.begin(count);
  is_reduced_.assign(count, false);
  lacks_reduction_.assign(count, false);
}

void PassDelivery::forget() {
  passes_.forget();
  is_reduced_.assign(is_reduced_.size(), false);
  lacks_reduction_.assign(lacks_reduction_.size(), false);
  is_due_ = has_reduced_ = false;
}

bool PassDelivery::lacks_reduction() const {
  return std::find(lacks_reduction_.begin(), lacks_reduction_.end(), true) !=
         lacks_reduction_.end();
}

void PassDelivery::coming(size_t index) {
  const std::string& name = layout_->infos()[index].name;
  if (options_.adds_up && is_reduced_[index]) passes_.refuse_one_more(name, options_.refuse);
  if (passes_.count(index, name, options_.refuse)) is_due_ = true;
  lacks_reduction_[index] = true;
}

void PassDelivery::begin_step(const Step& step) {
  WholeDelivery::begin_step(step);
  is_due_ = false;
}

void PassDelivery::came(size_t index) {
  check_layout(index);
  WholeDelivery::came(index);
}

void PassDelivery::deliver(Bucket& bucket, size_t slot) {
  WholeDelivery::deliver(bucket, slot);
  if (!touches_gradients()) return;
  const size_t index = parameter_of(bucket, slot);
  is_reduced_[index] = true;
  lacks_reduction_[index] = false;
  const at::NoGradGuard no_grad;
  at::Tensor& grad = parameter(index).mutable_grad();
  if (options_.factor != 1) grad.mul_(options_.factor);
  const bool is_sparse = options_.sparse_as_dense && options_.sparse[index];
  if (is_sparse && !grad.is_sparse()) grad = grad.to_sparse(1);  // rows, as Embedding makes them
}

void PassDelivery::after_backward() {
  is_due_ = false;
  if (touches_gradients()) has_reduced_ = true;
}

// What was accumulated is the caller's to drop: zero_grad() may come next.
void PassDelivery::abandon(const std::vector<bool>& is_delivered) {
  WholeDelivery::abandon(is_delivered);
  forget();
}

// A sparse gradient has a bucket of its own, which all ranks have planned.
void PassDelivery::check_layout(size_t index) {
  const at::Tensor& grad = parameter(index).grad();
  if (!grad.defined() || !grad.is_sparse()) return;
  if (options_.sparse_as_dense) {
    options_.sparse[index] = true;
    return;
  }
  const ParameterInfo& info = layout_->infos()[index];
  TORCH_CHECK_VALUE(
      info.sparse_gradient,
      error_text(kArea,
                 "got a sparse gradient of '" + info.name +
                     "', expected a dense one: it is the weight of no Embedding or EmbeddingBag "
                     "with sparse gradients that was there when the optimizer was wrapped",
                 options_.where,
                 in_language({.cpp = "Pass a module, or set sparse_as_dense.",
                              .python = "Wrap the optimizer after its model is made, or pass "
                                        "sparse_as_dense=True."})));
}

}  // namespace trireme::horovod
