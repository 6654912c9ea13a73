#pragma once

#include <trireme/common/export.h>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// The values that OptimizerParamState or OptimizerOptions writes into an archive, by name.
using ArchivedValues = std::map<std::string, c10::IValue>;

// The content of torch::optim::Optimizer::save(), taken apart; so the state of any optimizer can be
// looked at without its types. Parameters are counted through all groups.
struct OptimizerArchive {
  std::vector<int64_t> group_counts;    // how many parameters, by group
  std::vector<ArchivedValues> options;  // one per group
  std::vector<ArchivedValues> states;   // one per parameter; empty where it has none yet
};

// Throws ValueError for an archive that is not of the form torch has written since 1.5.
TRIREME_API OptimizerArchive read_optimizer_archive(torch::serialize::InputArchive& archive);
// Numbers stand for the parameters, where torch writes addresses.
TRIREME_API void write_optimizer_archive(const OptimizerArchive& content,
                                         torch::serialize::OutputArchive& archive);

// Read and write a living optimizer: by save() and read, by write and load(). Either costs a copy
// of its state. A load() leaves alone what the archive has no state for.
TRIREME_API OptimizerArchive take_apart(const torch::optim::Optimizer& optimizer);
TRIREME_API void put_into(torch::optim::Optimizer& optimizer, const OptimizerArchive& content);
TRIREME_API ArchivedValues take_apart(const torch::optim::OptimizerOptions& options);

}  // namespace trireme
