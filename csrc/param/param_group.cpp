#include <trireme/param/param_group.h>

#include <trireme/common/error.h>
#include <trireme/shm/segment.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme {
namespace {

constexpr const char* kArea = "fully_shard";

std::shared_ptr<HostStore> make_store(const std::vector<ParameterInfo>& infos,
                                      Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const int64_t bytes = HostStore::bytes_for(infos, where.world);
  if (where.world == 1) {  // nobody to share it with
    auto segment = shm::Segment::create(shm::SegmentKind::kAnonymous, bytes);
    return HostStore::make(std::make_shared<const shm::Segment>(std::move(segment)), infos, where);
  }
  SharedMemory memory = communicator.share_memory(bytes, "parameters of " + infos.front().name);
  TORCH_CHECK_NOT_IMPLEMENTED(
      memory.segment,
      error_text(kArea, "got ranks that do not share parameters: " + memory.why_not, where,
                 "Start the ranks on one host with the backend \"trireme\" and parameters on the "
                 "CPU; other ranks need the all-gather path, which is not built yet."));
  return HostStore::make(std::move(memory.segment), infos, where);
}

}  // namespace

ParamGroup::ParamGroup(std::vector<ShardedParamSpec> specs,
                       std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {
  const RankOf where = communicator_->rank_of();
  TORCH_CHECK_VALUE(!specs.empty(), error_text(kArea, "got a group without parameters", where,
                                               "Shard a module that has some."));
  std::vector<ParameterInfo> original;
  std::vector<ParameterInfo> cast;
  bool casts = false;
  for (const ShardedParamSpec& spec : specs) {
    original.push_back(stored_info(spec, spec.dtype));
    cast.push_back(stored_info(spec, spec.param_dtype.value_or(spec.dtype)));
    if (!spec.is_cast()) {  // takes no room there
      cast.back().sizes = {0};
      cast.back().numel = 0;
    }
    casts = casts || spec.is_cast();
  }
  stores_.original = make_store(original, *communicator_);
  if (casts) stores_.cast = make_store(cast, *communicator_);
  for (size_t i = 0; i < specs.size(); ++i)
    params_.emplace_back(std::move(specs[i]), static_cast<int64_t>(i), where, stores_);
  for (const ShardedParam& param : params_) shards_.push_back(param.sharded());
}

void ParamGroup::set_face(std::shared_ptr<const ModuleFace> face, std::vector<at::Tensor> leaves) {
  face_ = std::move(face);
  leaves_ = std::move(leaves);
  leaves_require_grad_.clear();
  for (const at::Tensor& leaf : leaves_) leaves_require_grad_.push_back(leaf.requires_grad());
}

void ParamGroup::follow_requires_grad() {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const bool by_leaf = leaves_[i].requires_grad();
    if (by_leaf != leaves_require_grad_[i]) face_->set_requires_grad(i, by_leaf);
    const bool requires_grad = face_->requires_grad(i);
    if (by_leaf != requires_grad) leaves_[i].set_requires_grad(requires_grad);
    leaves_require_grad_[i] = requires_grad;
  }
}

void ParamGroup::unshard() {
  if (std::exchange(is_unsharded_, true)) return;
  face_->show(true);
}

void ParamGroup::reshard() {
  if (!std::exchange(is_unsharded_, false)) return;
  face_->show(false);
}

void ParamGroup::finish_writes() {
  for (const ShardedParam& param : params_) param.cast_own();
  stores_.original->snapshot_versions(shards_);
  note_versions();
}

void ParamGroup::note_versions() {
  versions_.clear();
  leaf_versions_.clear();
  for (size_t i = 0; i < leaves_.size(); ++i) {
    versions_.push_back(face_->version(i));
    leaf_versions_.push_back(static_cast<uint32_t>(leaves_[i]._version()));
  }
}

std::vector<int64_t> ParamGroup::changed_outside() const {
  std::vector<int64_t> changed = stores_.original->changed_outside(shards_);
  for (size_t i = 0; i < versions_.size(); ++i)
    if (versions_[i] != face_->version(i) ||
        leaf_versions_[i] != static_cast<uint32_t>(leaves_[i]._version()))
      changed.push_back(static_cast<int64_t>(i));
  return changed;
}

void ParamGroup::bump_unsharded() {
  HostStore::bump_versions(leaves_);
  note_versions();
}

}  // namespace trireme
