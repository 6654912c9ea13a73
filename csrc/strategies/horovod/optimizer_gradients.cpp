#include <trireme/strategies/horovod/optimizer_gradients.h>

#include <trireme/comm/agree.h>
#include <trireme/grad/plan_agreement.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <unordered_set>
#include <utility>

// See [Note: gradients of an optimizer] in optimizer_gradients.h.

namespace trireme::horovod {
namespace {

void check_names(const std::vector<std::string>& names, RankOf where) {
  std::unordered_set<std::string> seen;
  std::string doubled;
  for (const std::string& name : names)
    if (!seen.insert(name).second) doubled += (doubled.empty() ? "'" : ", '") + name + "'";
  TORCH_CHECK_VALUE(doubled.empty(),
                    error_text(kArea, "got parameter names more than once: " + doubled, where,
                               "Parameter names in named_parameters must be unique."));
}

void check_devices(const std::vector<ParameterInfo>& infos, RankOf where) {
  TORCH_CHECK_VALUE(!infos.empty(), error_text(kArea, "got no parameters, expected at least one",
                                               where, "Pass model.parameters()."));
  for (const ParameterInfo& info : infos) {
    TORCH_CHECK_VALUE(info.device.type() == infos.front().device.type(),
                      error_text(kArea,
                                 "got parameters on several kinds of device, expected one: '" +
                                     infos.front().name + "' on " + infos.front().device.str() +
                                     " but '" + info.name + "' on " + info.device.str(),
                                 where, "Move all of them to one kind of device."));
  }
}

void check_predivide(const OptimizerGradientsOptions& options, RankOf where) {
  const double factor = options.predivide_factor;
  TORCH_CHECK_VALUE(
      factor == 1 || options.op == GradientOp::kAverage,
      error_text(kArea, "got gradient_predivide_factor beside another op than Average", where,
                 "Leave one of them out."));
  TORCH_CHECK_VALUE(factor > 0, error_text(kArea,
                                           "got gradient_predivide_factor=" + c10::str(factor) +
                                               ", expected a positive number",
                                           where, "Leave it out for the default of 1."));
}

const char* name_of(GradientOp op) {
  switch (op) {
    case GradientOp::kAverage:
      return "Average";
    case GradientOp::kSum:
      return "Sum";
    default:
      return "Adasum";
  }
}

std::string text_of(const OptimizerGradientsOptions& options) {
  return c10::str(
      "op=", name_of(options.op), "\nbackward_passes_per_step=", options.backward_passes_per_step,
      "\ngradient_predivide_factor=", options.predivide_factor,
      "\ncompression=", options.reduce_dtype ? c10::toString(*options.reduce_dtype) : "none",
      "\nsparse_as_dense=", options.sparse_as_dense);
}

Refuse or_error(Refuse refuse) {
  if (refuse) return refuse;
  return [](const std::string& text) { TORCH_CHECK(false, text); };
}

}  // namespace

// Counts passes where nothing is reduced.
class OptimizerGradients::Counter final : public GradSink {
 public:
  Counter(const NamedParameters& parameters, PassCounts passes, Refuse refuse,
          const BackwardTrigger& lock)
      : names_(parameters.names),
        passes_(std::move(passes)),
        refuse_(std::move(refuse)),
        lock_(lock) {
    passes_.begin(parameters.tensors.size());
    for (size_t i = 0; i < parameters.tensors.size(); ++i)
      if (parameters.tensors[i].requires_grad())
        hooks_.emplace_back(parameters.tensors[i], static_cast<int64_t>(i), *this,
                            /*also_before=*/true);
  }

  void gradient_due(int64_t index) override {
    const auto lock = lock_.lock();
    passes_.count(static_cast<size_t>(index), names_[static_cast<size_t>(index)], refuse_);
  }
  void gradient_ready(int64_t /*index*/, bool /*has_gradient*/) override {}
  PassCounts& passes() { return passes_; }

 private:
  std::vector<std::string> names_;
  PassCounts passes_;
  Refuse refuse_;
  const BackwardTrigger& lock_;
  std::vector<GradHook> hooks_;
};

OptimizerGradients::OptimizerGradients(const NamedParameters& parameters,
                                       std::shared_ptr<Communicator> communicator,
                                       OptimizerGradientsOptions options)
    : communicator_(std::move(communicator)),
      where_(communicator_->rank_of()),
      options_(std::move(options)),
      trigger_(std::make_shared<BackwardTrigger>(/*at_parameters=*/true)) {
  options_.refuse = or_error(std::move(options_.refuse));
  const std::vector<ParameterInfo> infos = describe_parameters(parameters);
  const PassCounts passes(options_.backward_passes_per_step, where_);
  check_names(parameters.names, where_);
  check_devices(infos, where_);
  check_predivide(options_, where_);
  communicator_->recover();  // from a backward of an earlier optimizer that was abandoned
  compare(infos);
  if (options_.op == GradientOp::kNone) {
    counter_ = std::make_unique<Counter>(parameters, passes, options_.refuse, *trigger_);
  } else {
    make_reducer(parameters);
  }
}

OptimizerGradients::~OptimizerGradients() = default;

// Compares what ranks were given, of which each may have something else.
void OptimizerGradients::compare(const std::vector<ParameterInfo>& infos) const {
  const c10::Device device = infos.front().device;
  const auto differs = first_difference(distinct_texts(
      {text_of(options_), "options of a DistributedOptimizer"}, *communicator_, device));
  if (differs) {
    TORCH_CHECK_VALUE(false,
                      error_text(kArea,
                                 c10::str("got ", differs->first, " on rank 0 and ", differs->other,
                                          " on rank ", differs->rank, ", expected the same"),
                                 where_, "Give DistributedOptimizer the same on all ranks."));
  }
  const std::string difference = difference_between_ranks(*communicator_, device, infos, kArea);
  TORCH_CHECK_VALUE(difference.empty(), difference);
}

// Returns a number for these gradients, by which ranks tell theirs apart.
int64_t OptimizerGradients::agree_on_number(c10::Device device) const {
  static std::atomic<int64_t> last_number{0};
  const at::Tensor number =
      at::full({1}, last_number + 1, at::TensorOptions().dtype(at::kLong).device(device));
  communicator_->all_reduce({number}, ReduceOp::kMax, "number of an optimizer").wait();
  last_number = number.item<int64_t>();
  return last_number;
}

void OptimizerGradients::make_reducer(NamedParameters parameters) {
  const auto world = static_cast<double>(where_.world);
  const bool predivides = options_.predivide_factor != 1;
  PassDelivery::Options passing;
  passing.passes_per_step = options_.backward_passes_per_step;
  passing.factor = predivides ? options_.predivide_factor / world : 1;
  passing.adds_up = options_.op == GradientOp::kSum && where_.world > 1;
  passing.sparse_as_dense = options_.sparse_as_dense;
  passing.sparse = parameters.sparse_gradient;
  if (options_.sparse_as_dense) parameters.sparse_gradient.assign(parameters.tensors.size(), false);
  passing.refuse = options_.refuse;
  passing.where = where_;
  delivery_ = std::make_shared<PassDelivery>(trigger_, std::move(passing));
  trigger_->ask_to_synchronize([delivery = std::weak_ptr(delivery_)] {
    const auto alive = delivery.lock();
    return alive && alive->is_due();
  });
  trigger_->set_armed_callback([this] { step_begins(); });
  GradReducerOptions reducing;
  reducing.area = kArea;
  reducing.reduce_dtype = options_.reduce_dtype;
  reducing.failed = options_.failed;
  reducing.bucket_prefix =
      "optimizer " + std::to_string(agree_on_number(parameters.tensors.front().device())) + ", ";
  GradReducerParts parts;
  parts.communicator = communicator_;
  parts.trigger = trigger_;
  parts.delivery = delivery_;
  reducer_ = GradReducer::make(parameters, std::move(parts), reducing);
  if (options_.op == GradientOp::kSum) reducer_->set_divisor(1);
  if (predivides) reducer_->set_divisor(options_.predivide_factor);
}

PassCounts& OptimizerGradients::passes() const {
  return delivery_ ? delivery_->passes() : counter_->passes();
}

std::unique_lock<std::recursive_mutex> OptimizerGradients::lock() const { return trigger_->lock(); }

void OptimizerGradients::check_alive() const {
  TORCH_CHECK_VALUE(ended_.empty(),
                    error_text(kArea, "got a step of a DistributedOptimizer after " + ended_,
                               where_, "Wrap the optimizer again."));
}

void OptimizerGradients::set_begun_callback(std::function<void(int64_t step)> begun) {
  const std::lock_guard lock(begun_mutex_);
  begun_.swap(begun);  // the earlier one may need Python's lock to go: after this one
}

void OptimizerGradients::step_begins() {
  const int64_t step = ++steps_begun_;
  std::function<void(int64_t)> begun;
  {
    const std::lock_guard lock(begun_mutex_);
    begun = begun_;
  }
  if (begun) begun(step);
}

void OptimizerGradients::reduce(bool all) {
  step_begins();
  reducer_->reduce_without_backward(all);
}

void OptimizerGradients::synchronize() {
  check_alive();
  if (reducer_) {
    bool has_reduced = false;
    bool lacks_reduction = false;
    {
      const auto lock = this->lock();
      has_reduced = delivery_->has_reduced();
      lacks_reduction = delivery_->lacks_reduction();
    }
    if (!has_reduced || lacks_reduction) reduce(/*all=*/!has_reduced);
  }
  forget_passes();
  was_synchronized_ = true;
}

void OptimizerGradients::begin_step() {
  check_alive();
  if (steps_synchronize_) synchronize();
  was_synchronized_ = false;
}

std::optional<std::string> OptimizerGradients::warning_of_step() const {
  if (!steps_synchronize_ || !was_synchronized_) return std::nullopt;
  return error_text(kArea,
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced again",
                    where_, "Step inside of optimizer.skip_synchronize().");
}

void OptimizerGradients::check_zero_grad() const {
  if (!ended_.empty()) return;
  const auto lock = this->lock();
  passes().check_zero_grad(options_.refuse);
  if (reducer_) reducer_->notice_changes();
}

void OptimizerGradients::set_backward_passes_per_step(int64_t passes) {
  check_alive();
  const auto lock = this->lock();
  this->passes().set_passes_per_step(passes, options_.refuse);
}

bool OptimizerGradients::has_passes() const {
  if (!ended_.empty()) return false;
  const auto lock = this->lock();
  return passes().any();
}

void OptimizerGradients::forget_passes() {
  if (!ended_.empty()) return;
  const auto lock = this->lock();
  delivery_ ? delivery_->forget() : passes().forget();
  was_synchronized_ = false;
}

void OptimizerGradients::shadow_backward() {
  check_alive();
  ++steps_begun_;
  reducer_->shadow_backward();
}

void OptimizerGradients::end(const std::string& why) {
  if (!ended_.empty()) return;
  ended_ = why;
  reducer_.reset();
  delivery_.reset();
  counter_.reset();
  set_begun_callback({});
  communicator_.reset();
}

}  // namespace trireme::horovod
