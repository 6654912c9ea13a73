#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/error.h>
#include <trireme/common/fork_guard.h>

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

// Returns whether partition= partitions an input: see [Note: one copy of what ranks have in
// common].
bool is_partitioned(const at::Tensor& input);

// Returns "Float[32, 1024]", with strides and device where these are not the usual ones.
std::string text_of_tensor(const at::Tensor& tensor);

// Returns a flat view of a tensor without gaps, its elements in the order of their addresses.
at::Tensor flat_view(const at::Tensor& tensor);

// Returns a hash of a tensor's bits, in the order of addresses. Of a GPU tensor (size and offset:
// multiples of 8 bytes) only hashes of rows and columns and the last < 8 KB are copied to the CPU.
int64_t hash_of_bits(const at::Tensor& tensor);

// Counters of kept bytes, for any thread.
struct KeptBytes {
  std::atomic<int64_t> inputs{0};
  std::atomic<int64_t> shared{0};
  std::atomic<int64_t> slices{0};
};

// The checkpoint and the input number of a tensor, for messages.
struct InputOrigin {
  std::shared_ptr<const std::string> function;
  size_t input = 0;

  // Returns "input 1 of Block (Float[32, 1024])".
  std::string text(const std::string& tensor) const;
};

// A checkpoint's input that ranks keep together. A derived class holds its values. The packer
// remembers it by a weak pointer, which keeps the object but not its values.
class PartitionedInput : public PackedSavedTensor {
 public:
  PartitionedInput(const at::Tensor& input, InputOrigin origin, RankOf where,
                   std::shared_ptr<KeptBytes> kept);
  ~PartitionedInput() override;

  // Throws for an input that was changed in place, as autograd does for its own: a function that
  // changes an input in the forward would also do so in the recomputation, in memory that all ranks
  // read. Throws in a forked child, whose parent goes on to use the memory.
  at::Tensor unpack() final;

  // Called by torch when the last owner goes while a weak pointer is left.
  void release_resources() final;

  // Returns whether this still holds the values of `tensor`, from which it was made.
  bool holds(const at::Tensor& tensor) const;
  std::string text() const;

 protected:
  // Adds to a counter of kept bytes, until this dies.
  void count(std::atomic<int64_t> KeptBytes::* which, int64_t bytes);
  at::IntArrayRef sizes() const { return sizes_; }
  at::IntArrayRef strides() const { return strides_; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  virtual at::Tensor restore() = 0;
  // Frees the values.
  virtual void drop() = 0;
  void count_no_more();

  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_;
  c10::VariableVersion counter_;  // shared with the input; does not keep its memory
  uint32_t version_;
  InputOrigin origin_;
  RankOf where_;
  ForkGuard fork_guard_;
  std::shared_ptr<KeptBytes> kept_;
  std::vector<std::pair<std::atomic<int64_t> KeptBytes::*, int64_t>> counted_;
};

}  // namespace trireme
