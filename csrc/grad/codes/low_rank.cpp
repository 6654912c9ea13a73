#include <trireme/grad/codes/low_rank.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <utility>

namespace trireme {
namespace {

// Returns views of adjacent matrices.
std::vector<at::Tensor> cut(const at::Tensor& flat, const std::vector<int64_t>& rows,
                            int64_t rank) {
  std::vector<at::Tensor> matrices;
  int64_t begin = 0;
  for (const int64_t count : rows) {
    matrices.push_back(flat.narrow(0, begin, count * rank).view({count, rank}));
    begin += count * rank;
  }
  return matrices;
}

// Makes columns orthonormal, one after the other; one that is nearly a sum of those before it
// becomes zeros.
void make_orthogonal(const at::Tensor& matrix) {
  for (int64_t column = 0; column < matrix.size(1); ++column) {
    const at::Tensor one = matrix.select(1, column);
    const double before = one.norm().item<double>();
    for (int again = 0; again < 2; ++again) {
      if (column == 0) break;
      const at::Tensor others = matrix.narrow(1, 0, column);
      one.sub_(others.mv(others.t().mv(one)));
    }
    const double length = one.norm().item<double>();
    if (length > 1e-6 * before && length > 0) {
      one.div_(length);
    } else if (length == length) {  // what is no number stays so
      one.zero_();
    }
  }
}

}  // namespace

at::Tensor LowRank::basis_of(const CodedGradient& gradient) const {
  at::Tensor& basis = gradient.kept->basis;
  // One that was loaded may be of another rank.
  if (!basis.defined() || basis.size(1) != method_.rank) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(method_.seed) ^
                                                    static_cast<uint64_t>(gradient.shape.numel()));
    basis = at::randn({gradient.shape.columns, method_.rank}, generator, at::kFloat);
  }
  return basis;
}

int64_t LowRank::start() {
  std::vector<int64_t> left_rows;
  std::vector<int64_t> right_rows;
  for (const CodedGradient& gradient : exchange_.gradients) {
    if (gradient.is_dense) continue;
    const MatrixShape& shape = gradient.shape;
    Matrix matrix{
        &gradient, at::from_blob(gradient.values, {shape.rows, shape.columns}, at::kFloat), {}, {}};
    if (gradient.kept->residual.defined())
      matrix.sum = matrix.sum + gradient.kept->residual.view_as(matrix.sum);
    left_rows.push_back(shape.rows);
    right_rows.push_back(shape.columns);
    matrices_.push_back(std::move(matrix));
  }
  const auto numel = [&](const std::vector<int64_t>& rows) {
    int64_t count = 0;
    for (const int64_t some : rows) count += some * method_.rank;
    return count;
  };
  lefts_ = at::empty({numel(left_rows)}, at::kFloat);
  rights_ = at::empty({numel(right_rows)}, at::kFloat);
  const auto lefts = cut(lefts_, left_rows, method_.rank);
  const auto rights = cut(rights_, right_rows, method_.rank);
  for (size_t i = 0; i < matrices_.size(); ++i) {
    matrices_[i].left = lefts[i];
    matrices_[i].right = rights[i];
    at::Tensor left = lefts[i];
    at::mm_out(left, matrices_[i].sum, basis_of(*matrices_[i].gradient));
  }
  dense_ = packed_dense();
  moved_ = lefts_;
  const int64_t sent = reduce(moved_);
  return sent + static_cast<int64_t>(rights_.nbytes()) + reduce(dense_);
}

void LowRank::go_on() {
  if (std::exchange(has_gone_on_, true)) return;
  const at::NoGradGuard no_grad;
  for (Pending& verb : verbs_) verb.wait();
  if (!moved_.is_same(lefts_)) lefts_.copy_(moved_);
  for (Matrix& matrix : matrices_) {
    make_orthogonal(matrix.left);
    at::mm_out(matrix.right, matrix.sum.t(), matrix.left);
  }
  rights_.mul_(exchange_.factor);
  moved_ = rights_;
  reduce(moved_);
}

void LowRank::finish() {
  const at::NoGradGuard no_grad;
  // The mean is as much of each sender's sum: all residuals together are what the means lack.
  const double share = exchange_.factor * static_cast<double>(exchange_.senders->world());
  if (!moved_.is_same(rights_)) rights_.copy_(moved_);
  for (const Matrix& matrix : matrices_) {
    const CodedGradient& gradient = *matrix.gradient;
    at::Tensor mean =
        at::from_blob(gradient.values, {gradient.shape.rows, gradient.shape.columns}, at::kFloat);
    at::mm_out(mean, matrix.left, matrix.right.t());
    if (!at::isfinite(mean).all().item<bool>()) continue;  // what is kept stays
    gradient.kept->basis = matrix.right.clone();
    at::Tensor residual = gradient.kept->residual;
    if (residual.defined()) residual.view_as(mean).copy_(matrix.sum).sub_(mean, 1 / share);
  }
  unpack_dense(dense_);
}

}  // namespace trireme
