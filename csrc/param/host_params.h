#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/param/param_memory.h>

#include <memory>
#include <vector>

namespace trireme {

// Parameters in the memory of a host, once for all its ranks: nothing is gathered there. On several
// hosts each has them once, and the writes of other hosts' ranks come when the step gate brings
// parts(). There a parameter with a param_dtype of its own takes that dtype per host, and its own
// dtype only as shards: on one host other ranks may read these, too.
class HostParams final : public ParamMemory {
 public:
  // Collective over ranks that share memory on each of their hosts, or one rank. Throws c10::Error
  // on all of them if memory is refused.
  HostParams(const std::vector<ShardedParamSpec>& specs,
             std::shared_ptr<Communicator> communicator);

  ParamPlace place(int64_t parameter) const override;
  Pending gather(const std::string& /*label*/) override { return {}; }
  void release() override {}
  at::Tensor read_whole(int64_t parameter) override;
  PartsByRank parts() const override;
  std::shared_ptr<HostStore> store() const override { return original_; }

 private:
  at::Tensor shard_of(HostStore& store, int64_t parameter, RankOf where) const;
  bool has_other_hosts() const;
  bool is_private(const ShardedParamSpec& spec) const {
    return spec.is_replicated() || (spec.is_cast() && has_other_hosts());
  }
  const ShardedParamSpec& spec_of(int64_t parameter) const {
    return specs_[static_cast<size_t>(parameter)];
  }

  std::vector<ShardedParamSpec> specs_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<HostStore> original_;
  std::shared_ptr<HostStore> cast_;  // null if no parameter is cast
  // This rank's shards outside of the stores; undefined for parameters that it writes in a store.
  std::vector<at::Tensor> private_shards_;
};

}  // namespace trireme
