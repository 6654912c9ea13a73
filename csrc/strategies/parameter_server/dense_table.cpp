#include <trireme/strategies/parameter_server/dense_table.h>

#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/worker_desk.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme::ps {
namespace {

bool lies_as_in_table(const at::Tensor& tensor, const at::Tensor& value) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == value.scalar_type();
}

}  // namespace

DenseTable::DenseTable(DenseTable::Parts parts)
    : Table(parts.steps.spec, parts.steps.board, std::move(parts.desk)),
      store_(parts.store),
      steps_(std::move(parts.steps), std::move(parts.plan), std::move(parts.store)) {
  if (parts.binds_module)
    bound_.emplace(BoundModule::Parts{name(), spec().names, spec().tensors, store_, shared_board(),
                                      steps_.memory()});
}

int64_t DenseTable::memory_bytes() const {
  return HostStore::bytes_for(store_->parameters(), store_->where().world) +
         steps_.plan().used_bytes(board().workers());
}

void DenseTable::require_module(std::string_view verb) const {
  TORCH_CHECK_VALUE(spec().is_module,
                    error_text(kPsArea,
                               c10::str(verb, ": got table '", spec().name,
                                        "' made of tensors, expected one made of a module"),
                               board().where(), "Pull its tensors, and push gradients by name."));
}

// --- pull ----------------------------------------------------------------------------------------

void DenseTable::copy_once(const std::vector<at::Tensor>& to) const {
  for (size_t i = 0; i < to.size(); ++i) {
    const at::Tensor& from = steps_.values()[i];
    if (from.numel() == 0) continue;
    if (lies_as_in_table(to[i], from)) {
      scaled_copy(span_of(to[i]), ConstSpan(span_of(from)), 1.0);
    } else {
      to[i].copy_(from);
    }
  }
}

void DenseTable::copy_values(const std::vector<at::Tensor>& to) {
  read_one_clock([&] { copy_once(to); });
  int64_t bytes = 0;
  for (const at::Tensor& one : to) bytes += static_cast<int64_t>(one.nbytes());
  desk().counts().bytes_pulled += bytes;
}

void DenseTable::fill_parameters() {
  ++desk().counts().pulls;
  desk().settle();
  if (bound_) return bound_->begin_reading();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& one : spec().tensors) parameters.push_back(one.detach());
  copy_values(parameters);
  HostStore::bump_versions(spec().tensors);
}

void DenseTable::pull() {
  TRIREME_TRACE("ps.pull");
  desk().check_worker("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  wait_for(board().clock());
  fill_parameters();
}

NamedTensors DenseTable::read(bool view) {
  ++desk().counts().pulls;
  desk().settle();
  const std::vector<ParameterInfo>& infos = store_->parameters();
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < infos.size(); ++i) {
    tensors.push_back(view ? store_->whole(static_cast<int64_t>(i))
                           : at::empty(infos[i].sizes, infos[i].dtype));
  }
  if (!view) copy_values(tensors);
  NamedTensors named;
  for (size_t i = 0; i < infos.size(); ++i) named.insert(infos[i].name, tensors[i]);
  return named;
}

void DenseTable::check_view(bool view) const {
  TORCH_CHECK_VALUE(!view || board().options().backup == 0,
                    error_text(kPsArea, "pull: got a view with backup workers, expected a copy",
                               board().where(), "A clock may close while a late worker reads."));
}

NamedTensors DenseTable::pull_tensors(bool view) {
  TRIREME_TRACE("ps.pull");
  desk().check_worker("pull");
  check_view(view);
  wait_for(board().clock());
  return read(view);
}

// --- push ----------------------------------------------------------------------------------------

at::Tensor DenseTable::checked_gradient(size_t index, const at::Tensor& gradient) const {
  if (!gradient.defined()) return {};
  const ParameterInfo& info = store_->parameters()[index];
  const auto refuse = [&](const std::string& got, const char* next_step) {
    TORCH_CHECK_VALUE(
        false, error_text(kPsArea,
                          c10::str("push: got a gradient of ", got, " for '", info.name,
                                   "' of table '", spec().name, "', expected ", info.dtype, " ",
                                   at::IntArrayRef(info.sizes)),
                          board().where(), next_step));
  };
  if (gradient.layout() != at::kStrided)
    refuse(c10::str("layout ", gradient.layout()), "Make it dense: use sparse=False in its layer.");
  if (gradient.sizes() != at::IntArrayRef(info.sizes))
    refuse(c10::str("shape ", gradient.sizes()), "Push gradients of the tensors of the table.");
  if (gradient.scalar_type() != info.dtype && gradient.scalar_type() != at::kFloat)
    refuse(c10::str("dtype ", gradient.scalar_type()), "Cast it to that, or to float32.");
  if (info.dtype == at::kDouble && gradient.scalar_type() != info.dtype)
    return gradient.detach().to(at::kCPU, at::kDouble).contiguous();
  return gradient.detach().to(at::kCPU).contiguous();
}

DenseTable::Gradients DenseTable::take_own_gradients() {
  Gradients gradients;
  for (size_t i = 0; i < spec().tensors.size(); ++i)
    gradients.push_back(checked_gradient(i, spec().tensors[i].grad()));
  return gradients;
}

DenseTable::Gradients DenseTable::gradients_by_name(const NamedTensors& gradients) const {
  Gradients found(spec().names.size());
  size_t known = 0;
  for (size_t i = 0; i < spec().names.size(); ++i) {
    const at::Tensor* one = gradients.find(spec().names[i]);
    if (one == nullptr) continue;
    found[i] = checked_gradient(i, *one);
    ++known;
  }
  for (const auto& item : gradients) {
    if (known == gradients.size()) break;
    const auto& names = spec().names;
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), item.key()) != names.end(),
                      error_text(kPsArea,
                                 c10::str("push: got a gradient of '", item.key(),
                                          "', expected names of table '", spec().name, "'"),
                                 board().where(), "Name tensors of the table."));
  }
  return found;
}

void DenseTable::push_gradients(const Gradients& gradients, double scale) {
  const Errand errand = this->errand("push");
  if (!begin_push(errand)) return;
  is_bsp() ? steps_.deposit(gradients, scale) : steps_.step_now(gradients, scale, errand);
  int64_t bytes = 0;
  for (const at::Tensor& one : gradients)
    if (one.defined()) bytes += static_cast<int64_t>(one.nbytes());
  desk().counts().bytes_pushed += bytes;
}

void DenseTable::push(double scale) {
  TRIREME_TRACE("ps.push");
  desk().check_worker("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  finish_pushes();
  push_gradients(take_own_gradients(), scale);
  for (const at::Tensor& one : spec().tensors) one.mutable_grad() = at::Tensor();
}

void DenseTable::push_tensors(const NamedTensors& gradients, double scale) {
  TRIREME_TRACE("ps.push");
  desk().check_worker("push");
  if (bound_) bound_->check_unchanged("push");
  finish_pushes();
  push_gradients(gradients_by_name(gradients), scale);
}

// --- what returns at once ------------------------------------------------------------------------

Pending DenseTable::push_or_keep(Gradients gradients, double scale) {
  if (can_push()) {
    finish_pushes();
    push_gradients(gradients, scale);
    return {};
  }
  for (at::Tensor& one : gradients)
    if (one.defined()) one = one.clone();  // the caller may write what he gave
  return push_later(
      [this, gradients = std::move(gradients), scale] { push_gradients(gradients, scale); });
}

Pending DenseTable::pull_async() {
  desk().check_worker("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  return pull_later([this] {
    fill_parameters();
    return std::vector<at::Tensor>();
  });
}

Pending DenseTable::pull_tensors_async(bool view) {
  desk().check_worker("pull");
  check_view(view);
  return pull_later([this, view] { return read(view).values(); });
}

Pending DenseTable::push_async(double scale) {
  desk().check_worker("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  Gradients gradients = take_own_gradients();
  for (const at::Tensor& one : spec().tensors) one.mutable_grad() = at::Tensor();
  return push_or_keep(std::move(gradients), scale);
}

Pending DenseTable::push_tensors_async(const NamedTensors& gradients, double scale) {
  desk().check_worker("push");
  if (bound_) bound_->check_unchanged("push");
  return push_or_keep(gradients_by_name(gradients), scale);
}

// --- writing -------------------------------------------------------------------------------------

DenseTable::Writing::Writing(DenseTable& table)
    : table_(table), exceptions_(std::uncaught_exceptions()) {
  table_.begin_writing();
}

DenseTable::Writing::~Writing() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    table_.abandon_writing("an exception, which its output shows");
  } else {
    table_.end_writing();
  }
}

void DenseTable::begin_writing() {
  const at::NoGradGuard no_grad;
  desk().check_worker("writing");
  TORCH_CHECK_VALUE(bound_,
                    error_text(kPsArea,
                               c10::str("writing: got table '", spec().name,
                                        "', expected one whose module lies in its memory"),
                               board().where(),
                               "Write them before the server is made, or push what changes them."));
  bound_->check_unchanged("writing");
  bound_->meet_writers();
  steps_.bring_to(board().clock(), errand("writing"));
  bound_->begin_writing();
  bound_->begin_reading();
}

void DenseTable::end_writing() {
  desk().check_worker("writing");
  bound_->end_writing();
}

void DenseTable::abandon_writing(const std::string& reason) noexcept {
  if (bound_) bound_->abandon_writing(reason);
}

// --- for the server ------------------------------------------------------------------------------

void DenseTable::before_clock() {
  if (bound_) bound_->check_unchanged("clock");
  Table::before_clock();
}

void DenseTable::after_clock() {
  if (bound_) bound_->end_reading();
  Table::after_clock();
}

CheckpointContent DenseTable::places(const std::string& prefix) const {
  CheckpointContent content;
  std::vector<CheckpointTensor>& states = content.tensors[kTableTensors];
  const auto add = [](std::vector<CheckpointTensor>& to, std::string name,
                      const at::Tensor& tensor) {
    to.push_back({std::move(name), tensor.scalar_type(), tensor.sizes().vec(), {tensor}});
  };
  const std::vector<std::string> state_names = names_of_states(spec().optimizer);
  for (size_t i = 0; i < spec().names.size(); ++i) {
    const auto tensor = static_cast<int64_t>(i);
    add(content.tensors[kModelTensors], prefix + spec().names[i], steps_.values()[i]);
    const std::string before = name() + "." + spec().names[i] + ".";
    for (size_t state = 0; state < state_names.size(); ++state)
      add(states, before + state_names[state], steps_.state(static_cast<int64_t>(state), tensor));
    add(states, before + "steps", steps_.step_counts(tensor));
  }
  if (has_learning_rate(spec().optimizer)) add(states, name() + ".lr", steps_.learning_rate());
  return content;
}

void DenseTable::drop_pushes() {
  Table::drop_pushes();
  if (is_bsp()) steps_.forget_deposit();
}

void DenseTable::note_loaded() {
  Table::note_loaded();
  if (bound_) bound_->end_reading();
}

void DenseTable::release_module() {
  if (!bound_) return;
  bound_->abandon_writing("it has closed its server");
  // Whatever follows, the parameters get memory of their own.
  const auto let_go = c10::make_scope_exit([this] {
    bound_->unbind();
    bound_.reset();
  });
  if (bound_->is_readable()) return;
  // A clock that is closed meanwhile may be applied while they are copied; then no further one is,
  // because this worker has not clocked it.
  steps_.bring_to(board().closed(), errand("close"));
  const uint64_t before = steps_.applied();
  bound_->unbind();
  if (board().closed() == before) return;
  steps_.bring_to(board().closed(), errand("close"));
  bound_->refresh();
}

}  // namespace trireme::ps
