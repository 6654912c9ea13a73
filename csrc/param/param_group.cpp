#include <trireme/param/param_group.h>

#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/memory/host_store.h>
#include <trireme/param/gathered_params.h>
#include <trireme/param/host_params.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme {
namespace {

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

std::string label_of(const std::vector<ShardedParamSpec>& specs) {
  const std::string& first = specs.front().name;
  return specs.size() == 1 ? first : first + " .. " + specs.back().name;
}

}  // namespace

bool ParamGroup::gathers_over(Communicator& communicator, c10::Device device) {
  return !device.is_cpu() || (communicator.world() > 1 && communicator.host() == nullptr);
}

ParamGroup::ParamGroup(ParamGroupRequest request)
    : communicator_(std::move(request.communicator)),
      gathers_with_(request.gathers_with ? std::move(request.gathers_with) : communicator_),
      device_(request.device) {
  const RankOf where = communicator_->rank_of();
  TORCH_CHECK_VALUE(!request.specs.empty(),
                    error_text("fully_shard", "got a group without parameters", where,
                               "Shard a module that has some."));
  label_ = label_of(request.specs);
  gathers_ = request.always_gathers || gathers_over(*communicator_, device_);
  if (gathers_) {
    reshards_with_ = std::move(request.reshards_with);
    memory_ = std::make_shared<GatheredParams>(GatheredParams::Request{
        request.specs, gathers_with_, reshards_with_, device_, request.pins_memory});
  } else {
    memory_ = std::make_shared<HostParams>(request.specs, communicator_);
  }
  for (size_t i = 0; i < request.specs.size(); ++i)
    params_.emplace_back(std::move(request.specs[i]), where,
                         memory_->place(static_cast<int64_t>(i)));
}

void ParamGroup::set_face(std::shared_ptr<const ModuleFace> face, std::vector<at::Tensor> leaves,
                          std::vector<at::Tensor> shown) {
  face_ = std::move(face);
  leaves_ = std::move(leaves);
  shown_ = shown.empty() ? leaves_ : std::move(shown);
  leaves_require_grad_.clear();
  for (const at::Tensor& leaf : leaves_) leaves_require_grad_.push_back(leaf.requires_grad());
}

void ParamGroup::follow_requires_grad() {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const bool by_leaf = shown_[i].requires_grad();
    if (by_leaf != leaves_require_grad_[i]) face_->set_requires_grad(i, by_leaf);
    const bool requires_grad = face_->requires_grad(i);
    for (const at::Tensor& leaf : {leaves_[i], shown_[i]})
      if (leaf.requires_grad() != requires_grad) leaf.set_requires_grad(requires_grad);
    leaves_require_grad_[i] = requires_grad;
  }
}

void ParamGroup::unshard() {
  if (!gathers_) return;
  TRIREME_TRACE("param_group.unshard");
  wait_for_unshard();
  gathering_ = memory_->gather("unit " + label_);
  has_unsharded_ = true;
}

void ParamGroup::wait_for_unshard() {
  Pending arriving = std::exchange(gathering_, {});
  try {
    arriving.wait();
  } catch (...) {
    has_unsharded_ = false;  // but keeps its memory: an engine may still write there
    memory_->forget_pieces();
    throw;
  }
}

void ParamGroup::show_unsharded() {
  if (std::exchange(is_shown_, true)) return;
  face_->show(true);
}

void ParamGroup::show_sharded() {
  if (std::exchange(is_shown_, false)) face_->show(false);
}

void ParamGroup::reshard() {
  show_sharded();
  if (!std::exchange(has_unsharded_, false)) return;
  wait_for_unshard();
  memory_->release();
}

void ParamGroup::reshard_to_all() {
  memory_->reshard_to_all();
  reshards_with_.reset();
}

void ParamGroup::finish_writes() {
  memory_->copy_shards([this] {
    for (const ShardedParam& param : params_) param.cast_own();
  });
  note_versions();
}

void ParamGroup::share_writes() {
  finish_writes();
  memory_->forget_pieces();
  Host* host = communicator_->host();
  const std::string label = "unit " + label_;
  (host ? host->all_gather_in_host(memory_->parts(), label) : communicator_->barrier(label)).wait();
}

ParamGroup::Versions ParamGroup::versions_of(size_t parameter) const {
  return {version_of(params_[parameter].sharded()), face_->version(parameter),
          version_of(leaves_[parameter]) + version_of(shown_[parameter])};
}

void ParamGroup::note_versions() {
  versions_.clear();
  for (size_t i = 0; i < leaves_.size(); ++i) versions_.push_back(versions_of(i));
}

std::vector<int64_t> ParamGroup::changed_outside() const {
  std::vector<int64_t> changed;
  for (size_t i = 0; i < versions_.size(); ++i)
    if (versions_[i] != versions_of(i)) changed.push_back(static_cast<int64_t>(i));
  return changed;
}

void ParamGroup::bump_unsharded() {
  HostStore::bump_versions(leaves_);
  std::vector<at::Tensor> others;
  for (size_t i = 0; i < shown_.size(); ++i)
    if (!shown_[i].is_same(leaves_[i])) others.push_back(shown_[i]);
  HostStore::bump_versions(others);
  note_versions();
}

}  // namespace trireme
