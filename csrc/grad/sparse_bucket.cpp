#include <trireme/grad/sparse_bucket.h>

#include <ATen/ATen.h>

namespace trireme {

void SparseBucket::begin_step(bool shadow) {
  Bucket::begin_step(shadow);
  buffer_.reset();
}

void SparseBucket::complete(double scale) {
  const at::Tensor grad = contribution(0);
  slots_[0].packed = true;
  if (grad.defined()) {
    check_dtype(grad, slots_[0]);
    const at::Tensor sparse = grad.is_sparse() ? grad : grad.to_sparse(1);
    buffer_ = sparse.detach().mul(scale).to(plan_.dtype);
    return;
  }
  // One sparse dimension, as every sparse gradient has (Embedding, EmbeddingBag); engines compare
  // it.
  std::vector<int64_t> no_rows = slots_[0].sizes;
  no_rows[0] = 0;
  const at::TensorOptions options = parameter(0).options();
  buffer_ = at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)),
                                  at::empty(no_rows, options.dtype(plan_.dtype)), slots_[0].sizes);
}

Pending SparseBucket::reduce(Communicator& ranks, const std::string& label) {
  return ranks.all_reduce({buffer_}, ReduceOp::kSum, label);
}

void SparseBucket::deliver(size_t slot, bool /*as_bucket_view*/) {
  at::Tensor& grad = parameter(slot).mutable_grad();
  // A layer tied to the embedding may have made its gradient dense.
  const bool is_dense = grad.defined() && !grad.is_sparse();
  const at::Tensor reduced = is_dense ? buffer_.to_dense() : buffer_;
  if (grad.defined() && slots_[slot].origin != GradOrigin::kFresh) {
    grad.copy_(reduced);
  } else {
    grad = reduced.to(slots_[slot].dtype);
  }
}

}  // namespace trireme
