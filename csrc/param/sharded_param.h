#pragma once

// Parameter path 1/2. In: fully_shard  Out: param_group.h

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/host_store.h>
#include <trireme/memory/shard_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: a parameter of a host, sharded and unsharded]
//
//   sharded     this rank's slice of dimension `dim`, by torch.chunk's rule; what the optimizer
//               writes, in the parameter's dtype
//   unsharded   all of it; what forward and backward read, in param_dtype
//
// Both lie in memory that the ranks of the host share, and for one dtype the first is a part of the
// second: nothing is gathered. Memory runs along `dim` first, so that each shard is one piece; an
// unsharded parameter that is sharded along another dimension than its first is a strided tensor.
// With a param_dtype of its own there are two stores, and each owner casts its shard once per step
// for the whole host.
//
// A parameter without dimensions has nothing to shard: each rank has and steps its own, and all of
// them come to the same.
struct ShardedParamSpec {
  std::string name;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  int64_t dim = 0;  // which is sharded; from 0 on
  // Of the unsharded parameter, and of its gradient on the wire; `dtype` if absent.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};
  bool requires_grad = true;

  bool is_replicated() const { return sizes.empty(); }
  bool is_cast() const { return param_dtype.value_or(dtype) != dtype; }
};

// As it lies in memory: the sharded dimension first.
TRIREME_API ParameterInfo stored_info(const ShardedParamSpec& spec, at::ScalarType dtype);

// Where parameters of a group lie; `cast` is null where none is cast.
struct ParamStores {
  std::shared_ptr<HostStore> original;
  std::shared_ptr<HostStore> cast;
};

class TRIREME_API ShardedParam {
 public:
  // `index`: in the stores.
  ShardedParam(ShardedParamSpec spec, int64_t index, RankOf where, const ParamStores& stores);

  const ShardedParamSpec& spec() const { return spec_; }

  // Over the stores; the same tensors in every call.
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& unsharded() const { return unsharded_; }

  // Writes this rank's shard: of a whole parameter, or from a tensor shaped like sharded().
  void write_whole(const at::Tensor& whole) const;
  void write_shard(const at::Tensor& shard) const;
  // Whether sharded() still is where all ranks look for it; no longer after `.data =`.
  bool lies_in_store() const { return sharded_.const_data_ptr() == place_.const_data_ptr(); }
  // It is there again.
  void return_to_store() const { sharded_.set_data(place_); }
  // Of a param_dtype of its own: brings this rank's part of unsharded() up to date.
  void cast_own() const;

 private:
  at::Tensor along_dim(const at::Tensor& stored) const;

  ShardedParamSpec spec_;
  int64_t first_row_ = 0;  // of the sharded dimension
  int64_t rows_ = 0;
  at::Tensor sharded_;
  at::Tensor place_;  // where sharded_ belongs
  at::Tensor unsharded_;
  at::Tensor own_cast_;  // this rank's part of unsharded_, if that has a dtype of its own
};

}  // namespace trireme
