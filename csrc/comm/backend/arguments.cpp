#include <trireme/comm/backend/arguments.h>

#include <trireme/comm/shm_tensors.h>

#include <ATen/ATen.h>

namespace trireme {

ShmArguments& ShmArguments::take(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) return complain("an undefined tensor");
    if (!tensor.is_cpu()) return complain("a tensor on " + tensor.device().str());
    if (tensor.layout() != at::kStrided) return complain("a tensor that is not dense");
    if (dtype_ && tensor.scalar_type() != *dtype_) {
      return complain(std::string(c10::toString(*dtype_)) + " and " +
                      c10::toString(tensor.scalar_type()) + " in one call");
    }
    dtype_ = tensor.scalar_type();
  }
  return *this;
}

ShmArguments& ShmArguments::expect(bool fine, const std::function<std::string()>& got) {
  return fine ? *this : complain(got());
}

ShmArguments& ShmArguments::count(const char* what, size_t got, int64_t expected) {
  return expect(got == static_cast<size_t>(expected), [&] {
    return std::to_string(got) + " " + what + ", expected " + std::to_string(expected);
  });
}

ShmArguments& ShmArguments::numel(const char* what, int64_t got, int64_t expected) {
  return expect(got == expected, [&] {
    return std::to_string(got) + " elements in " + what + ", expected " + std::to_string(expected);
  });
}

ShmArguments& ShmArguments::root(int64_t rank, int64_t world) {
  return expect(rank >= 0 && rank < world, [&] {
    return "root " + std::to_string(rank) + ", expected one of the group's " +
           std::to_string(world) + " ranks";
  });
}

shm::ReduceOptions ShmArguments::reduction(const c10d::ReduceOp& op) {
  shm::ReduceOptions how;
  how.dtype = shm_dtype(dtype());
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      how.op = shm::ReduceOp::kSum;
      break;
    case c10d::ReduceOp::AVG:
      how.op = shm::ReduceOp::kAvg;
      break;
    case c10d::ReduceOp::PRODUCT:
      how.op = shm::ReduceOp::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      how.op = shm::ReduceOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      how.op = shm::ReduceOp::kMax;
      break;
    case c10d::ReduceOp::BAND:
      how.op = shm::ReduceOp::kBand;
      break;
    case c10d::ReduceOp::BOR:
      how.op = shm::ReduceOp::kBor;
      break;
    case c10d::ReduceOp::BXOR:
      how.op = shm::ReduceOp::kBxor;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      how.op = shm::ReduceOp::kPremulSum;
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor == nullptr) {
        complain("ReduceOp.PREMUL_SUM without a factor");
      } else {  // one number, c10d has seen to that
        how.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                     : factor->double_factor;
      }
      break;
    }
    case c10d::ReduceOp::UNUSED:
      complain("ReduceOp.UNUSED");
  }
  return how;
}

ShmArguments& ShmArguments::complain(const std::string& got) {
  if (complaint_.empty()) complaint_ = std::string(name_) + " got " + got;
  return *this;
}

std::vector<int64_t> ShmArguments::split_numels(const char* what, const at::Tensor& tensor,
                                                const std::vector<int64_t>& splits, int64_t world) {
  std::vector<int64_t> numels(static_cast<size_t>(world), 0);
  if (!fine()) return numels;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> row_splits = splits;
  if (splits.empty()) {
    expect(rows % world == 0, [&] {
      return std::to_string(rows) + " rows in " + what + ", expected a multiple of " +
             std::to_string(world);
    });
    row_splits.assign(numels.size(), rows / world);
  } else {
    int64_t split_rows = 0;
    for (const int64_t split : splits) {
      expect(split >= 0, [&] { return "a split of " + std::to_string(split); });
      split_rows += split;
    }
    count("splits", splits.size(), world);
    expect(split_rows == rows, [&] {
      return "splits of " + std::to_string(split_rows) + " rows for the " + std::to_string(rows) +
             " in " + what;
    });
  }
  if (!fine() || rows == 0) return numels;
  for (size_t i = 0; i < numels.size(); ++i) numels[i] = row_splits[i] * (tensor.numel() / rows);
  return numels;
}

}  // namespace trireme
