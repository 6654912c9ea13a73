#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/error.h>
#include <trireme/common/forks.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Says whether partition= takes an input, or leaves it as it is: see [Note: one copy of what ranks
// have in common].
bool is_partitioned(const at::Tensor& input);

// Returns "Float[32, 1024]", with strides and device where these are not the usual ones.
std::string text_of_tensor(const at::Tensor& tensor);

// Shows the elements of a tensor without gaps in the order of their addresses.
at::Tensor flat_view(const at::Tensor& tensor);

// Hashes bits where they are: what comes to the CPU of a GPU's tensor are hashes of rows and
// columns.
int64_t hash_of_bits(const at::Tensor& tensor);

// Counts bytes that are kept, from any thread.
struct KeptBytes {
  std::atomic<int64_t> inputs{0};
  std::atomic<int64_t> shared{0};
  std::atomic<int64_t> slices{0};
};

// Says which input of which checkpoint a tensor is, for messages.
struct InputOrigin {
  std::shared_ptr<const std::string> function;
  size_t input = 0;

  // Returns "input 1 of Block (Float[32, 1024])".
  std::string text(const std::string& tensor) const;
};

// Is an input of a checkpoint that ranks keep together. A derived class holds its values. The
// packer remembers it by a weak pointer, which keeps the object but nothing of what it holds.
class PartitionedInput : public PackedTensor {
 public:
  PartitionedInput(const at::Tensor& input, InputOrigin origin, RankOf where,
                   std::shared_ptr<KeptBytes> kept);
  ~PartitionedInput() override;

  // Throws for an input that was changed in place, as autograd does for those that it keeps itself:
  // what a function changes in the forward it would change in the recomputation, too, in memory
  // that all ranks read. Throws in a forked child, whose parent goes on to use the memory.
  at::Tensor unpack() final;

  // Torch calls this when the last owner goes and a weak pointer is left.
  void release_resources() final;

  // Says whether this holds what is in `tensor`, which it was made of.
  bool holds(const at::Tensor& tensor) const;
  std::string text() const;

 protected:
  // Adds to what is kept, until this dies.
  void count(std::atomic<int64_t> KeptBytes::* which, int64_t bytes);
  at::IntArrayRef sizes() const { return sizes_; }
  at::IntArrayRef strides() const { return strides_; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  virtual at::Tensor restore() = 0;
  // Lets go of the values.
  virtual void drop() = 0;
  void count_no_more();

  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_;
  c10::VariableVersion counter_;  // shared with the input, whose memory this does not keep
  uint32_t version_;
  InputOrigin origin_;
  RankOf where_;
  uint64_t forks_ = forks_so_far();
  std::shared_ptr<KeptBytes> kept_;
  std::vector<std::pair<std::atomic<int64_t> KeptBytes::*, int64_t>> counted_;
};

}  // namespace trireme
