#pragma once

// Parameter path 1/3. In: fully_shard  Out: param_group.h

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/shard_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: a parameter, sharded and unsharded]
//
//   sharded     this rank's slice of dimension `dim`, by torch.chunk's rule; what the optimizer
//               writes, in the parameter's dtype
//   unsharded   all of it; what forward and backward read, in param_dtype
//
// Memory runs along `dim` first, so that each shard is one piece, and the shards of all ranks laid
// end to end are the parameter: no data are ever copied out of the gathered buffer. An unsharded
// parameter that is sharded along another dimension than its first is a strided tensor.
//
//   host_params.h      both lie in memory that the ranks of a host share, and for one dtype the
//                      first is a part of the second: nothing is gathered on a host. With a
//                      param_dtype of its own there are two stores, and each owner casts its shard
//                      once per step for the whole host
//   gathered_params.h  each rank has its shards, and gathers the rest into a buffer of its own when
//                      they are needed
//
// A parameter without dimensions has nothing to shard: each rank has and steps its own, and all of
// these stay equal.

// Where a rank has its shard, its gradient and so the optimizer's state, of a parameter that is
// gathered onto another device.
enum class ShardOffload : uint8_t {
  kNone,       // on that device
  kOptimizer,  // in CPU memory; on the device a copy in param_dtype, made when the shard is written
  kAll,        // in CPU memory; copied to the device for each gather
};

struct ShardedParamSpec {
  std::string name;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  int64_t dim = 0;  // the dimension that is sharded; from 0 on
  // The dtype of the unsharded parameter, and that of its gradient on the wire; `dtype` if
  // absent. See also grad_dtype.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};
  bool requires_grad = true;
  ShardOffload offload = ShardOffload::kNone;
  // The dtype of the gradient that the optimizer gets, if not `dtype`; that of the gradient on the
  // transport, too, unless reduce_dtype says another.
  std::optional<at::ScalarType> grad_dtype = {};

  bool is_replicated() const { return sizes.empty(); }
  at::ScalarType gradient_dtype() const { return grad_dtype.value_or(dtype); }
  // Returns the dtype in which gradients travel, and are accumulated on a rank.
  at::ScalarType wire_dtype() const { return reduce_dtype.value_or(gradient_dtype()); }
  bool is_cast() const { return param_dtype.value_or(dtype) != dtype; }
};

// Describes the parameter as it lies in memory: the sharded dimension first.
TRIREME_API ParameterInfo stored_info(const ShardedParamSpec& spec, at::ScalarType dtype);

// The rows that a rank has of the sharded dimension; none of a replicated parameter.
struct ShardRows : ChunkRows {
  int64_t numel = 0;  // elements of a row

  ShardRows(const ShardedParamSpec& spec, RankOf where);
};

// Where a parameter lies, the sharded dimension first.
struct ParamPlace {
  at::Tensor shard;  // this rank's shard, in the parameter's dtype
  at::Tensor whole;  // in param_dtype
  // The tensor that the owner of the shard keeps up to date in param_dtype, if any: this rank's
  // part of `whole`, or the copy of a shard that is offloaded.
  at::Tensor own_cast;
};

class TRIREME_API ShardedParam {
 public:
  // `where` is the place among the ranks that share the parameter.
  ShardedParam(ShardedParamSpec spec, RankOf where, const ParamPlace& place);

  const ShardedParamSpec& spec() const { return spec_; }

  // Return tensors over the group's memory, the same ones in every call.
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& unsharded() const { return unsharded_; }
  // Returns the tensor whose .grad receives this rank's part of a gradient; it is shaped like
  // sharded() and lies where the parameter is computed with. For an offloaded shard it is a leaf of
  // its own, without memory; else sharded().
  const at::Tensor& gradient_leaf() const { return gradient_leaf_; }

  // Write this rank's shard: of a whole parameter, or from a tensor shaped like sharded().
  void write_whole(const at::Tensor& whole) const;
  void write_shard(const at::Tensor& shard) const;
  // Returns whether sharded() still is where the group looks for it; no longer after `.data =`.
  bool lies_in_store() const { return sharded_.const_data_ptr() == place_.const_data_ptr(); }
  // Puts sharded() back where the group looks for it.
  void return_to_store() const { sharded_.set_data(place_); }
  // Brings this rank's part of unsharded() up to date, if others read it in a param_dtype of its
  // own; or the copy of an offloaded shard, in the caller's current stream.
  void cast_own() const;
  // Returns `stored`, shaped as it lies in memory, as the user sees it.
  at::Tensor along_dim(const at::Tensor& stored) const;

 private:
  ShardedParamSpec spec_;
  ShardRows rows_;
  at::Tensor sharded_;
  at::Tensor place_;  // where sharded_ belongs
  at::Tensor unsharded_;
  at::Tensor gradient_leaf_;
  at::Tensor own_cast_;
};

}  // namespace trireme
