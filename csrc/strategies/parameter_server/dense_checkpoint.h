#pragma once

#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/strategies/parameter_server/dense_steps.h>
#include <trireme/strategies/parameter_server/table.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace trireme::ps {

// The checkpoint content of a dense table; see [Note: a server in a checkpoint] in
// table_checkpoint.h. If several hosts keep rows of a tensor, a block takes the number of steps of
// the row that it begins in. Made for one use, while all workers stand still.
class DenseCheckpoint {
 public:
  DenseCheckpoint(const DenseSteps& steps, const TableSpec& spec, const TableLayout& layout)
      : steps_(steps), spec_(spec), layout_(layout) {}

  // See the functions of Table.
  std::vector<at::Tensor> share_tensors() const;
  size_t count_share_tensors(int64_t host) const;
  CheckpointContent described(const std::string& prefix) const;
  CheckpointContent content(const std::string& prefix, const SharesByHost& shares) const;
  CheckpointContent places(const std::string& prefix) const;
  void read_rest(const CheckpointReader& reader) const;

 private:
  size_t states() const { return static_cast<size_t>(count_states(spec_.optimizer)); }

  const DenseSteps& steps_;
  const TableSpec& spec_;
  const TableLayout& layout_;
};

}  // namespace trireme::ps
