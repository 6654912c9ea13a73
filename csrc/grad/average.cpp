#include <trireme/grad/average.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace trireme {
namespace {

// Returns zeros as the value of a rank that has none.
at::Tensor zeros_of(const at::Tensor& like, bool is_sparse) {
  if (!is_sparse) return at::zeros_like(like, at::MemoryFormat::Contiguous);
  return at::sparse_coo_tensor(like.sizes(),
                               like.options().layout(at::kSparse).requires_grad(false));
}

}  // namespace

ValueCounts count_values(Communicator& group, const std::vector<at::Tensor>& values,
                         const std::string& label) {
  at::Tensor found = at::zeros({2, static_cast<int64_t>(values.size())}, at::kDouble);
  auto* here = found.mutable_data_ptr<double>();
  for (size_t i = 0; i < values.size(); ++i) {
    here[i] = values[i].defined() ? 1 : 0;
    here[values.size() + i] = values[i].defined() && values[i].is_sparse() ? 1 : 0;
  }
  found = found.to(group.device());
  group.all_reduce({found}, ReduceOp::kSum, label).wait();
  found = found.cpu();
  const auto* of_all = found.const_data_ptr<double>();
  ValueCounts counts;
  for (size_t i = 0; i < values.size(); ++i) {
    counts.any.push_back(static_cast<int64_t>(of_all[i]));
    counts.sparse.push_back(static_cast<int64_t>(of_all[values.size() + i]));
  }
  return counts;
}

GroupAverage::GroupAverage(std::shared_ptr<Communicator> group, std::unique_ptr<OuterAllReduce> sum)
    : group_(std::move(group)), sum_(std::move(sum)) {}

void GroupAverage::begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
                         const Labels& labels) {
  if (like.empty()) return;
  const at::NoGradGuard no_grad;
  const ValueCounts counts = count_values(*group_, values, labels.found);
  Reduction dense;
  for (size_t i = 0; i < like.size(); ++i) {
    if (counts.any[i] == 0) continue;
    const bool is_sparse = counts.sparse[i] == counts.any[i];
    const at::Tensor value = values[i].defined() ? values[i] : zeros_of(like[i], is_sparse);
    if (is_sparse) {
      launch({{like[i]}, {value.coalesce()}}, labels.sums);
      continue;
    }
    dense.like.push_back(like[i]);
    dense.sums.push_back(value.is_sparse() ? value.to_dense() : value.contiguous());
  }
  if (!dense.sums.empty()) launch(std::move(dense), labels.sums);
}

void GroupAverage::launch(Reduction reduction, const std::string& label) {
  reduction.pending = sum_->sum(reduction.sums, label);
  in_flight_.push_back(std::move(reduction));
}

void GroupAverage::finish(const Place& place) {
  const at::NoGradGuard no_grad;
  for (Reduction& reduction : in_flight_) {
    reduction.pending.wait();
    for (size_t i = 0; i < reduction.sums.size(); ++i) {
      reduction.sums[i].div_(group_->world());
      place(reduction.like[i], std::move(reduction.sums[i]));
    }
  }
  in_flight_.clear();
}

}  // namespace trireme
