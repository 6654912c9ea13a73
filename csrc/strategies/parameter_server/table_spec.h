#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/parameter_server/options.h>

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
using Sum = SumSpec;
using Optimizer = OptimizerSpec;

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

struct DenseOptions {
  Reduction reduction = Reduction::kMean;
  std::optional<int64_t> staleness = {};  // in place of the server's; ssp only
};

// Says what a table holds and how it is stepped. Worker 0's tensors give the first values.
struct TableSpec {
  std::string name;
  std::vector<std::string> names;  // one per tensor
  std::vector<at::Tensor> tensors;
  bool is_module = false;  // the tensors are parameters, which pull() fills
  Optimizer optimizer;
  DenseOptions options;
};

// Describes a table of dense tensors: the parameters of a module, each once under its first name
// (buffers are no part of it), or tensors by name. Takes real floating tensors; those of a table
// may differ in dtype. Throws nothing: the server's constructor refuses what cannot be.
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

// Returns what is wrong with a list of tables under a mode; empty if nothing is.
TRIREME_API std::string complaint_about(const std::vector<TableSpec>& tables, Mode mode);
// Returns what all ranks have alike, one line for the table and one for each tensor.
TRIREME_API std::string to_string(const TableSpec& table);

}  // namespace trireme::ps
