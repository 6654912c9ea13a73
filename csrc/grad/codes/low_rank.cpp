#include <trireme/grad/codes/low_rank.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
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

// Returns whether all elements of left x right are finite: at once where those of the two are small
// enough for their sums, without making the product.
bool has_finite_product(const at::Tensor& left, const at::Tensor& right) {
  const at::Tensor most = left.abs().amax(0).dot(right.abs().amax(1));
  return std::isfinite(most.item<float>()) || at::isfinite(left.mm(right)).all().item<bool>();
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
      matrix.sum.add_(gradient.kept->residual.view_as(matrix.sum));
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
    const at::Tensor right = matrix.right.t();
    at::Tensor mean = matrix.sum;                  // takes its place
    if (has_finite_product(matrix.left, right)) {  // else what is kept stays
      KeptOfCode& kept = *matrix.gradient->kept;
      kept.basis = matrix.right.clone();
      if (kept.residual.defined()) {
        at::Tensor residual = kept.residual.view_as(mean);
        at::addmm_out(residual, matrix.sum, matrix.left, right, /*beta=*/1, /*alpha=*/-1 / share);
      }
    }
    at::mm_out(mean, matrix.left, right);
  }
  unpack_dense(dense_);
}

}  // namespace trireme
