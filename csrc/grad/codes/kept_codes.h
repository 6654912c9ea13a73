#pragma once

#include <trireme/grad/bucket.h>
#include <trireme/grad/codes/gradient_coder.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// This rank's shard of a parameter that is coded as if it were the parameter.
struct CodedShard {
  std::vector<int64_t> sizes;
  int64_t numel = 0;
  std::vector<int64_t> largest;  // the sizes of the largest shard
};

// Returns this rank's shards of parameters whose rows are split: their sizes are in the order in
// which they lie in memory.
TRIREME_API std::vector<CodedShard> coded_shards(const std::vector<ParameterInfo>& parameters,
                                                 const OwnShards& own);

// The gradients that one coder codes, for a view of what it keeps of them.
struct TRIREME_API KeptCodes {
  GradientCoder* coder;
  std::vector<ParameterInfo> parameters;  // whole ones, in the order of their numbers
  std::vector<at::Tensor> tensors;        // by which the coder knows them
  OwnShards own = {};       // the part of each that is coded here; all of it without a plan
  std::string prefix = {};  // tells it from other coders of a model

  // Returns " of shard 0/2"; nothing where whole parameters are coded.
  std::string shard_text() const;

  // Returns what this rank keeps, in elements of the whole parameters; see
  // GradientCoder::kept_parts().
  std::vector<KeptPart> parts(bool makes) const;
};

}  // namespace trireme
