#include <trireme/strategies/fsdp/fsdp.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/grad/output_hook.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/memory/buffer_pool.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

// See [Note: a step of fully sharded training] in fsdp.h.

namespace trireme {
namespace {

constexpr const char* kArea = "fully_shard";
constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;
constexpr int64_t kBucketBytes = int64_t{25} << 20;

bool runs_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Which rank gets which elements of a gradient, as it lies in memory.
ShardPlan plan_of(const std::vector<ParameterInfo>& stored, int64_t world) {
  ShardPlan plan = make_shard_plan({stored, world, ShardPlacement::kDim0});
  for (size_t i = 0; i < stored.size(); ++i)  // every rank steps its own
    if (stored[i].sizes.empty())
      std::fill(plan.shards[i].begin(), plan.shards[i].end(), ShardRange{0, 1});
  return plan;
}

std::shared_ptr<GradReducer> make_reducer(const Fsdp::Request& request) {
  NamedParameters parameters{request.names, {}, std::vector<bool>(request.names.size(), false)};
  GradReducerOptions options;
  options.caps = {{kFirstBucketBytes, kBucketBytes}};
  options.area = kArea;
  options.arms_at_parameters = true;
  std::vector<ParameterInfo> stored;
  for (const auto& group : request.groups) {
    for (size_t i = 0; i < group->params().size(); ++i) {
      const ShardedParam& param = group->params()[i];
      const ShardedParamSpec& spec = param.spec();
      parameters.tensors.push_back(group->leaves()[i]);
      options.sharded_parameters.push_back(param.sharded());
      options.reduce_dtypes.emplace_back(spec.reduce_dtype.value_or(spec.dtype));
      stored.push_back(stored_info(spec, spec.dtype));
    }
  }
  const std::shared_ptr<Communicator>& sharers = request.groups.front()->communicator();
  options.shards = std::make_shared<const ShardPlan>(plan_of(stored, sharers->world()));
  options.scatters_with = sharers;
  options.replicates_with = request.replicates_with;
  return GradReducer::make(std::move(parameters), request.communicator, std::move(options));
}

// What other hosts read of each rank, in all groups.
PartsByRank parts_of(const std::vector<std::shared_ptr<ParamGroup>>& groups) {
  PartsByRank all;
  for (const auto& group : groups) {
    const PartsByRank parts = group->memory().parts();
    all.resize(std::max(all.size(), parts.size()));
    for (size_t rank = 0; rank < parts.size(); ++rank)
      all[rank].insert(all[rank].end(), parts[rank].begin(), parts[rank].end());
  }
  return all;
}

}  // namespace

std::shared_ptr<ParamGroup> make_param_group(ParamGroupRequest request) {
  std::vector<ParameterInfo> infos;
  for (const ShardedParamSpec& spec : request.specs) {
    infos.push_back(stored_info(spec, spec.dtype));
    infos.back().sizes = spec.sizes;
  }
  check_same_parameters(*request.communicator, request.device, infos, kArea);
  return std::make_shared<ParamGroup>(std::move(request));
}

std::shared_ptr<Fsdp> Fsdp::make(Request request) {
  const c10::InferenceMode no_inference(false);
  return std::shared_ptr<Fsdp>(new Fsdp(std::move(request)));
}

Fsdp::Fsdp(Request request)
    : groups_(std::move(request.groups)),
      names_(std::move(request.names)),
      communicator_(std::move(request.communicator)),
      gate_(groups_.front()->store(), groups_.front()->communicator(), parts_of(groups_)),
      prefetch_(groups_),
      reducer_(make_reducer({groups_, names_, communicator_, request.replicates_with})) {
  const auto pool = std::make_shared<BufferPool>(groups_.front()->device());
  for (const auto& group : groups_) {
    group->memory().share_pool(pool);
    for (const ShardedParam& param : group->params()) shards_.push_back(param.sharded());
  }
}

// One forward of a unit that gathers, as backward sees it.
struct Fsdp::Use {
  size_t inputs = 0;     // that get gradients
  int64_t backward = 0;  // that has entered it
  size_t inputs_left = 0;
};

void Fsdp::pre_forward(const Forward& forward, const std::vector<at::Tensor>& inputs) {
  if (runs_backward()) {  // computed again by a checkpoint
    enter_backward();
    if (forward.is_root && forwards_in_backward_.empty())
      prefetch_.repeat_forward(forward.group.get());
    if (forward.group && forward.group->has_unsharded()) {  // for its backward, which needs it, too
      forward.group->wait_for_unshard();
      return forward.group->show_unsharded();
    }
  } else {
    if (forward.is_root) depth_ = 0;
    if (depth_++ == 0) begin_forward(forward);
    if (forward.group && forward.group->gathers())
      open_uses_[forward.group.get()].push_back(watch_inputs(forward.group, inputs));
  }
  if (!forward.group) return;
  prefetch_.need(*forward.group);
  forward.group->show_unsharded();
}

void Fsdp::begin_forward(const Forward& forward) {
  ++forward_;
  open_uses_.clear();
  for (const auto& group : groups_) group->follow_requires_grad();
  reducer_->before_forward();
  begin_reading();
  prefetch_.begin_forward(forward.group.get(), at::GradMode::is_enabled());
}

// When the last of them has its gradient, backward has left the unit. Of a leaf nobody can tell
// cheaply; then the unit stays until backward is over.
std::shared_ptr<Fsdp::Use> Fsdp::watch_inputs(const std::shared_ptr<ParamGroup>& group,
                                              const std::vector<at::Tensor>& inputs) {
  auto use = std::make_shared<Use>();
  if (!at::GradMode::is_enabled()) return use;
  std::vector<at::Tensor> watched;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    if (input.is_leaf()) return use;
    watched.push_back(input);
  }
  use->inputs = watched.size();
  for (const at::Tensor& input : watched) {
    on_output_gradient(input, [self = weak_from_this(), group, use] {
      if (const auto alive = self.lock()) alive->post_backward(*group, *use);
    });
  }
  return use;
}

void Fsdp::post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs,
                        bool all_found) {
  if (runs_backward()) return;
  const bool trains = at::GradMode::is_enabled();
  const std::shared_ptr<Use> use = close_use(forward.group.get());
  if (trains) watch_outputs(forward, outputs, use);
  if (forward.group && forward.group->reshard_after_forward())
    prefetch_.done(*forward.group, /*hold=*/trains && !all_found);
  depth_ = std::max<int64_t>(depth_ - 1, 0);
  if (depth_ > 0) return;
  prefetch_.end_pass();
  if (trains) reducer_->after_forward(outputs, /*synchronize=*/true, all_found);
}

std::shared_ptr<Fsdp::Use> Fsdp::close_use(const ParamGroup* group) {
  const auto open = open_uses_.find(group);
  if (open == open_uses_.end() || open->second.empty()) return nullptr;
  std::shared_ptr<Use> use = std::move(open->second.back());
  open->second.pop_back();
  return use;
}

void Fsdp::watch_outputs(const Forward& forward, const std::vector<at::Tensor>& outputs,
                         const std::shared_ptr<Use>& use) {
  if (!forward.group && !forward.is_root) return;
  const Pass pass{forward_, prefetch_.forward_key()};
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    on_output_gradient(output, [self = weak_from_this(), group = forward.group, use, pass] {
      if (const auto alive = self.lock()) alive->pre_backward(group.get(), use.get(), pass);
    });
  }
}

void Fsdp::abandon_forward(const std::string& reason) noexcept {
  if (runs_backward()) return;  // which says so, if it is more than a checkpoint's early end
  depth_ = 0;
  if (!prefetch_.is_in_pass()) return;
  prefetch_.reset();
  const RankOf where = communicator_->rank_of();
  if (where.world == 1) return;
  const std::string text =
      error_text(kArea, "a forward was abandoned: " + reason, where, "See the traceback there.");
  communicator_->announce_failure(text);
  groups_.front()->gathers_with()->announce_failure(text);
}

void Fsdp::unshard(ParamGroup& group) {
  prefetch_.need(group);
  group.show_unsharded();
}

void Fsdp::begin_unshard(ParamGroup& group) { prefetch_.need_later(group); }

void Fsdp::reshard(ParamGroup& group) { prefetch_.drop(group); }

void Fsdp::begin_reading() {
  if (!gate_.is_writing()) return check_writes();
  TRIREME_TRACE("fsdp.begin_reading");
  const c10::InferenceMode no_inference(false);
  for (const auto& group : groups_) group->finish_writes();
  gate_.begin_reading();
  prefetch_.expire();
  for (const auto& group : groups_) group->bump_unsharded();
}

void Fsdp::begin_writing() {
  if (gate_.is_writing()) return;
  TRIREME_TRACE("fsdp.begin_writing");
  check_writes();
  gate_.begin_writing();
}

// A slower rank may have read while this one wrote; or the unsharded parameters are still those of
// before.
void Fsdp::check_writes() {
  size_t first = 0;
  for (const auto& group : groups_) {
    const std::vector<int64_t> changed = group->changed_outside();
    if (!changed.empty() && !group->has_unsharded()) {
      group->finish_writes();  // nobody has what was there before
    } else if (!changed.empty()) {
      const std::string name = names_[first + static_cast<size_t>(changed.front())];
      const std::string why = group->gathers() ? "while it was kept unsharded"
                                               : "when other ranks of the host may be reading it";
      for (const auto& one : groups_) one->finish_writes();  // said once
      TORCH_CHECK(false, error_text(kArea,
                                    "parameter '" + name +
                                        "' was written after a forward and before "
                                        "optimizer.step(), " +
                                        why,
                                    communicator_->rank_of(),
                                    "Write it inside `with trireme.writing(model):` (C++: between "
                                    "begin_writing() and the next forward)."));
    }
    first += group->params().size();
  }
}

// Lives in the end callback of a backward, which autograd destroys uncalled if an exception leaves
// it.
class Fsdp::PostBackward {
 public:
  explicit PostBackward(std::shared_ptr<Fsdp> fsdp) : fsdp_(std::move(fsdp)) {}
  ~PostBackward() {
    if (fsdp_) fsdp_->abandon_backward();
  }
  PostBackward(const PostBackward&) = delete;
  PostBackward& operator=(const PostBackward&) = delete;

  void finish() { std::exchange(fsdp_, nullptr)->finish_backward(); }

 private:
  std::shared_ptr<Fsdp> fsdp_;
};

void Fsdp::enter_backward() {
  if (std::exchange(in_backward_, true)) return;
  ++backward_;
  uses_in_backward_.clear();
  forwards_in_backward_.clear();
  prefetch_.begin_backward();
  const auto scope = std::make_shared<PostBackward>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->finish(); });
}

// The backward that runs has reached a unit.
void Fsdp::pre_backward(ParamGroup* group, Use* use, const Pass& pass) {
  enter_backward();
  if (forwards_in_backward_.insert(pass.number).second) prefetch_.enter_forward(pass.key);
  if (group == nullptr) return;
  if (use != nullptr && use->backward != backward_) {
    use->backward = backward_;
    use->inputs_left = use->inputs;
    ++uses_in_backward_[group];
    prefetch_.need(*group);
  }
  group->show_unsharded();
}

// And has left it.
void Fsdp::post_backward(ParamGroup& group, Use& use) {
  if (use.backward != backward_ || --use.inputs_left > 0) return;
  if (--uses_in_backward_[&group] == 0 && group.reshard_after_backward()) prefetch_.done(group);
}

void Fsdp::shadow_step(const std::shared_ptr<ParamGroup>& root) {
  if (prefetch_.gathers()) {
    begin_forward({root, true});
    prefetch_.end_pass();
    prefetch_.begin_backward();
    prefetch_.enter_forward(prefetch_.forward_key());
    prefetch_.gather_rest();  // the others reduce meanwhile
  }
  reducer_->shadow_backward(/*deliver=*/true);
  prefetch_.end_pass();
}

void Fsdp::finish_backward() {
  try {
    prefetch_.end_pass();
  } catch (...) {
    abandon_backward();
    throw;
  }
  reshard_after_backward();
}

void Fsdp::abandon_backward() noexcept {
  prefetch_.reset();
  reshard_after_backward();
}

void Fsdp::reshard_after_backward() {
  in_backward_ = false;
  for (const auto& group : groups_)
    if (group->reshard_after_backward()) group->show_sharded();
}

std::vector<at::Tensor> Fsdp::take_gradients(const std::vector<int64_t>& parameters) const {
  std::vector<at::Tensor> gradients;
  for (const int64_t parameter : parameters)
    gradients.push_back(
        std::exchange(shards_[static_cast<size_t>(parameter)].mutable_grad(), at::Tensor()));
  return gradients;
}

void Fsdp::set_synchronize(const std::vector<bool>& groups) {
  TORCH_INTERNAL_ASSERT(groups.size() == groups_.size());
  synchronize_ = std::find(groups.begin(), groups.end(), true) != groups.end();
  std::vector<bool> held;
  for (size_t i = 0; i < groups.size(); ++i)
    held.insert(held.end(), groups_[i]->params().size(), synchronize_ && !groups[i]);
  reducer_->hold(held);
  reducer_->set_synchronize(synchronize_ && !manual_);
}

void Fsdp::set_divide_factors(const std::vector<double>& groups) {
  TORCH_INTERNAL_ASSERT(groups.size() == groups_.size());
  std::vector<double> factors;
  for (size_t i = 0; i < groups.size(); ++i)
    factors.insert(factors.end(), groups_[i]->params().size(), groups[i]);
  reducer_->set_divide_factors(std::move(factors));
}

void Fsdp::set_manual_finalization(bool manual) {
  manual_ = manual;
  reducer_->set_synchronize(synchronize_ && !manual_);
}

void Fsdp::finalize_backward() {
  if (synchronize_) reducer_->reduce_accumulated();
  reshard_after_backward();
}

void Fsdp::reset() {
  depth_ = 0;
  open_uses_.clear();
  prefetch_.reset();
  for (const auto& group : groups_) group->show_sharded();
  reducer_->drop_accumulated();
}

}  // namespace trireme
