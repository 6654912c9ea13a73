#include <trireme/strategies/fsdp/fsdp.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/grad/output_hook.h>
#include <trireme/grad/plan_agreement.h>

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

std::shared_ptr<GradReducer> make_reducer(const std::vector<std::shared_ptr<ParamGroup>>& groups,
                                          const std::vector<std::string>& names,
                                          const std::shared_ptr<Communicator>& communicator) {
  NamedParameters parameters{names, {}, std::vector<bool>(names.size(), false)};
  GradReducerOptions options;
  options.caps = {{kFirstBucketBytes, kBucketBytes}};
  options.area = kArea;
  options.arms_at_parameters = true;
  std::vector<ParameterInfo> stored;
  for (const auto& group : groups) {
    for (size_t i = 0; i < group->params().size(); ++i) {
      const ShardedParam& param = group->params()[i];
      const ShardedParamSpec& spec = param.spec();
      parameters.tensors.push_back(group->leaves()[i]);
      options.sharded_parameters.push_back(param.sharded());
      options.reduce_dtypes.emplace_back(spec.reduce_dtype.value_or(spec.dtype));
      stored.push_back(stored_info(spec, spec.dtype));
    }
  }
  options.shards = std::make_shared<const ShardPlan>(plan_of(stored, communicator->world()));
  return GradReducer::make(std::move(parameters), communicator, std::move(options));
}

}  // namespace

std::shared_ptr<ParamGroup> make_param_group(std::vector<ShardedParamSpec> specs,
                                             std::shared_ptr<Communicator> communicator) {
  std::vector<ParameterInfo> infos;
  for (const ShardedParamSpec& spec : specs) {
    infos.push_back(stored_info(spec, spec.dtype));
    infos.back().sizes = spec.sizes;
  }
  check_same_parameters(*communicator, c10::kCPU, infos, kArea);
  return std::make_shared<ParamGroup>(std::move(specs), std::move(communicator));
}

std::shared_ptr<Fsdp> Fsdp::make(std::vector<std::shared_ptr<ParamGroup>> groups,
                                 std::vector<std::string> names,
                                 std::shared_ptr<Communicator> communicator) {
  const c10::InferenceMode no_inference(false);
  return std::shared_ptr<Fsdp>(
      new Fsdp(std::move(groups), std::move(names), std::move(communicator)));
}

Fsdp::Fsdp(std::vector<std::shared_ptr<ParamGroup>> groups, std::vector<std::string> names,
           std::shared_ptr<Communicator> communicator)
    : groups_(std::move(groups)),
      names_(std::move(names)),
      communicator_(std::move(communicator)),
      gate_(groups_.front()->store(), communicator_),
      reducer_(make_reducer(groups_, names_, communicator_)) {
  for (const auto& group : groups_)
    for (const ShardedParam& param : group->params()) shards_.push_back(param.sharded());
}

void Fsdp::pre_forward(const Forward& forward) {
  if (runs_backward()) {  // computed again by a checkpoint
    await_end_of_backward();
  } else {
    if (forward.is_root) depth_ = 0;
    if (depth_++ == 0) begin_forward();
  }
  if (forward.group) forward.group->unshard();
}

void Fsdp::begin_forward() {
  for (const auto& group : groups_) group->follow_requires_grad();
  reducer_->before_forward();
  begin_reading();
}

void Fsdp::post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs,
                        bool all_found) {
  if (runs_backward()) return;
  const bool trains = at::GradMode::is_enabled();
  if (forward.group) {
    for (const at::Tensor& output : outputs) {
      if (!trains || !output.requires_grad() || output.is_leaf()) continue;
      on_output_gradient(output, [self = weak_from_this(), group = forward.group] {
        if (const auto alive = self.lock()) alive->pre_backward(group.get());
      });
    }
    if (forward.group->reshard_after_forward()) forward.group->reshard();
  }
  depth_ = std::max<int64_t>(depth_ - 1, 0);
  if (depth_ == 0 && trains) reducer_->after_forward(outputs, /*synchronize=*/true, all_found);
}

void Fsdp::begin_reading() {
  if (!gate_.is_writing()) return check_writes();
  TRIREME_TRACE("fsdp.begin_reading");
  const c10::InferenceMode no_inference(false);
  for (const auto& group : groups_) group->finish_writes();
  gate_.begin_reading();
  for (const auto& group : groups_) group->bump_unsharded();
}

void Fsdp::begin_writing() {
  if (gate_.is_writing()) return;
  TRIREME_TRACE("fsdp.begin_writing");
  check_writes();
  gate_.begin_writing();
}

// A slower rank may have read while this one wrote.
void Fsdp::check_writes() {
  size_t first = 0;
  for (const auto& group : groups_) {
    const std::vector<int64_t> changed = group->changed_outside();
    if (!changed.empty()) {
      const std::string name = names_[first + static_cast<size_t>(changed.front())];
      for (const auto& one : groups_) one->finish_writes();  // said once
      TORCH_CHECK(false,
                  error_text(kArea,
                             "parameter '" + name +
                                 "' was written after a forward and before optimizer.step(), when "
                                 "other ranks of the host may be reading it",
                             communicator_->rank_of(),
                             "Write it inside `with trireme.writing(model):` (C++: between "
                             "begin_writing() and the next forward)."));
    }
    first += group->params().size();
  }
}

// The backward that runs has reached a unit.
void Fsdp::pre_backward(ParamGroup* group) {
  await_end_of_backward();
  group->unshard();
}

// Lives in the end callback of a backward, which autograd destroys uncalled if an exception leaves
// it.
class Fsdp::PostBackward {
 public:
  explicit PostBackward(std::shared_ptr<Fsdp> fsdp) : fsdp_(std::move(fsdp)) {}
  ~PostBackward() { fsdp_->post_backward(); }
  PostBackward(const PostBackward&) = delete;
  PostBackward& operator=(const PostBackward&) = delete;

 private:
  std::shared_ptr<Fsdp> fsdp_;
};

void Fsdp::await_end_of_backward() {
  if (std::exchange(in_backward_, true)) return;
  auto scope = std::make_shared<std::unique_ptr<PostBackward>>(
      std::make_unique<PostBackward>(shared_from_this()));
  torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->reset(); });
}

void Fsdp::post_backward() noexcept {
  in_backward_ = false;
  for (const auto& group : groups_)
    if (group->reshard_after_backward()) group->reshard();
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

void Fsdp::set_manual_finalization(bool manual) {
  manual_ = manual;
  reducer_->set_synchronize(synchronize_ && !manual_);
}

void Fsdp::finalize_backward() {
  if (synchronize_) reducer_->reduce_accumulated();
  post_backward();
}

void Fsdp::reset() {
  depth_ = 0;
  for (const auto& group : groups_) group->reshard();
  reducer_->drop_accumulated();
}

}  // namespace trireme
