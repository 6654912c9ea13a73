#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/parameter_server/options.h>
#include <trireme/strategies/parameter_server/row_init.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme::ps {

using SGD = SgdSpec;
using Adam = AdamSpec;
using AdamW = AdamWSpec;
using Adagrad = AdagradSpec;
using RowwiseAdagrad = RowwiseAdagradSpec;
using Sum = SumSpec;
using Optimizer = OptimizerSpec;

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

struct DenseOptions {
  Reduction reduction = Reduction::kMean;
  std::optional<int64_t> staleness = {};  // in place of the server's; ssp only
};

// The rows of a sparse table and their options.
struct SparseOptions {
  RowInit init = Zeros{};
  uint64_t seed = 0;  // first values depend on it and on a row's id alone
  at::ScalarType dtype = at::kFloat;
  std::optional<int64_t> rows = {};  // ids are in [0, rows); absent: any int64
  Reduction reduction = Reduction::kMean;
  std::optional<int64_t> staleness = {};  // in place of the server's; ssp only
};
struct RowShape {
  int64_t dim = 0;
  RowInit init = Zeros{};
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  std::optional<int64_t> rows = {};
};

// The content of a table and its optimizer. Worker 0's tensors give the first values.
struct TableSpec {
  std::string name;
  std::vector<std::string> names;  // one per tensor
  std::vector<at::Tensor> tensors;
  bool is_module = false;  // the tensors are parameters, which pull() fills
  Optimizer optimizer;
  DenseOptions options;
  std::optional<RowShape> rows = {};  // a sparse table's, which has no tensors
  // Set on a worker that has joined, if the tensors belong to a module in other processes.
  bool has_module_elsewhere = false;
  // A module's buffers, which are no part of the table: one worker's are saved beside it.
  std::vector<std::pair<std::string, at::Tensor>> buffers = {};
};

// Describes a table of dense tensors: the parameters of a module, each once under its first name
// (buffers are no part of it), or tensors by name. Takes real floating tensors; those of a table
// may differ in dtype. Throws nothing: the server's constructor refuses invalid tables.
TRIREME_API TableSpec dense(std::string name, const torch::nn::Module& module, Optimizer optimizer,
                            DenseOptions options = {});
TRIREME_API TableSpec dense(std::string name, const NamedTensors& tensors, Optimizer optimizer,
                            DenseOptions options = {});
template <typename Module>
TableSpec dense(std::string name, const torch::nn::ModuleHolder<Module>& holder,
                Optimizer optimizer, DenseOptions options = {}) {
  return dense(std::move(name), static_cast<const torch::nn::Module&>(*holder),
               std::move(optimizer), options);
}

// Describes a sparse table: rows of `dim` elements by an integer. A row comes into being when its
// id is first pulled or pushed. Throws nothing, as dense().
TRIREME_API TableSpec sparse(std::string name, int64_t dim, Optimizer optimizer,
                             SparseOptions options = {});

// Returns "rows of 64 Float, Normal(std=0.01), seed=0".
TRIREME_API std::string to_string(const RowShape& rows);
// Returns what is wrong with a list of tables under a mode; empty if nothing is.
TRIREME_API std::string complaint_about(const std::vector<TableSpec>& tables, Mode mode);
// Returns the data that is equal on all ranks, one line for the table and one for each tensor.
TRIREME_API std::string to_string(const TableSpec& table);

}  // namespace trireme::ps
