#pragma once

#include <trireme/shm/collectives.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// The arguments of a collective, and what is wrong with them. An error is not thrown here, since
// one rank may be the only one to see it: the reason travels, and all ranks raise
// (Collectives::refuse).
class ShmArguments {
 public:
  explicit ShmArguments(const char* name) : name_(name) {}

  // Takes dense tensors on CPU, all of one dtype.
  ShmArguments& take(const std::vector<at::Tensor>& tensors);
  ShmArguments& take(const at::Tensor& tensor) { return take(std::vector<at::Tensor>{tensor}); }
  ShmArguments& expect(bool fine, const std::function<std::string()>& got);
  ShmArguments& count(const char* what, size_t got, int64_t expected);
  ShmArguments& numel(const char* what, int64_t got, int64_t expected);
  ShmArguments& root(int64_t rank, int64_t world);

  // Translates c10d's ReduceOp for elements of the dtype that was taken.
  shm::ReduceOptions reduction(const c10d::ReduceOp& op);

  // Returns the elements for each of `world` ranks: rows of dim 0 by `splits`, or equal parts if
  // there are none.
  std::vector<int64_t> split_numels(const char* what, const at::Tensor& tensor,
                                    const std::vector<int64_t>& splits, int64_t world);

  bool fine() const { return complaint_.empty(); }
  const std::string& complaint() const { return complaint_; }
  at::ScalarType dtype() const { return dtype_.value_or(at::kByte); }
  const char* name() const { return name_; }

 private:
  ShmArguments& complain(const std::string& got);

  const char* name_;
  std::optional<at::ScalarType> dtype_;
  std::string complaint_;
};

}  // namespace trireme
