#pragma once

#include <trireme/shm/dtype.h>
#include <trireme/shm/pieces.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

shm::Dtype shm_dtype(at::ScalarType dtype);

// Tensors as a collective reads or writes them: in their own memory if that is contiguous, else in
// a copy that lives as long as this. Tensors of a list that is read and written do not overlap each
// other, if need be by copies.
class ShmTensors {
 public:
  enum class Use { kRead, kWrite, kReadWrite };

  ShmTensors(std::vector<at::Tensor> tensors, Use use);
  ShmTensors(const at::Tensor& tensor, Use use)
      : ShmTensors(std::vector<at::Tensor>{tensor}, use) {}

  // Returns all tensors as one run of pieces.
  shm::Pieces pieces() const;
  // Returns the pieces of each tensor by itself.
  std::vector<shm::Pieces> pieces_of_each() const;
  // Returns the first tensor, flattened, in runs of `numels` elements.
  std::vector<shm::Pieces> ranges(const std::vector<int64_t>& numels) const;
  // Adds the first tensor, flattened, in as many equal parts as there are ranks: one more piece for
  // each.
  void add_parts(std::vector<shm::Pieces>& by_rank) const;

  // Copies all tensors, so that writes to other memory do not change what is read.
  void make_copies();

  // Brings results from copies to the caller's tensors.
  void write_back();

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> flat_;
  Use use_;
};

// Copies a result to the caller's tensor. One that was made under inference_mode may be written
// under that mode alone, which the thread that runs the operation need not be in.
void copy_over(const at::Tensor& to, const at::Tensor& from);

// Returns whether a collective that writes outputs[r] while it still reads inputs[r], in the order
// of their bytes, may read a result. In place it does not: a byte of inputs[r] that lies in
// outputs[r] at the same offset has been read before it is written.
bool would_read_results(const std::vector<shm::Pieces>& outputs,
                        const std::vector<shm::Pieces>& inputs);

}  // namespace trireme
