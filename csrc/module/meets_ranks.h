#pragma once

#include <trireme/common/export.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

namespace trireme {

// A module whose forward and backward meet other ranks while it trains (SyncBatchNorm). Code that
// runs it on some of these ranks only refuses it: the others would wait.
class TRIREME_API MeetsRanks {
 public:
  virtual ~MeetsRanks() = default;
  // Returns how many ranks meet.
  virtual int64_t ranks_that_meet() const = 0;
};

// Returns the type and place of the first module in `module` that trains and meets more ranks than
// `most`, "SyncBatchNormImpl at 'norm'"; empty if there is none.
TRIREME_API std::string meeting_of_ranks(const torch::nn::Module& module, int64_t most);

}  // namespace trireme
