#include <trireme/strategies/parameter_server/dense_table.h>

#include <trireme/activation/kept_results.h>
#include <trireme/common/dtype_name.h>
#include <trireme/common/resolved.h>
#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/dense_checkpoint.h>
#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/worker_session.h>

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
  return tensor.is_cpu() && tensor.is_contiguous() && is_resolved(tensor) &&
         tensor.scalar_type() == value.scalar_type();
}

}  // namespace

DenseTable::DenseTable(DenseTable::Parts parts)
    : Table(parts.spec ? parts.spec : parts.steps.spec, parts.steps.board, std::move(parts.session),
            std::move(parts.spread)),
      store_(parts.store),
      infos_(infos_of(spec())),
      steps_(std::move(parts.steps), std::move(parts.plan), std::move(parts.store)) {
  if (parts.binds_module)
    bound_.emplace(BoundModule::Parts{name(), spec().names, spec().tensors, store_, shared_board(),
                                      steps_.memory()});
  if (!spec().is_module) return;
  keeps_ = std::make_shared<ParameterTable>(name());
  put_table(spec().tensors, keeps_);
}

int64_t DenseTable::memory_bytes() const {
  return HostStore::bytes_for(store_->parameters(), store_->where().world) +
         steps_.plan().used_bytes(board().workers());
}

bool DenseTable::is_bound() const {
  const auto turn = session().turn();
  return bound_.has_value();
}

bool DenseTable::is_readable() const {
  const auto turn = session().turn();
  return !bound_ || bound_->is_readable();
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
  const std::vector<TableShare>& shares = layout().own_shares;
  for (size_t i = 0; i < shares.size(); ++i) {
    const at::Tensor& from = steps_.values()[i];
    if (from.numel() == 0) continue;
    const at::Tensor place =
        remote() == nullptr ? to[i] : rows_of(to[static_cast<size_t>(shares[i].tensor)], shares[i]);
    if (lies_as_in_table(place, from)) {
      scaled_copy(span_of(place), ConstSpan(span_of(from)), 1.0);
    } else {
      place.copy_(from);
    }
  }
}

void DenseTable::copy_values(const std::vector<at::Tensor>& to, const RemoteAnswers& answers) {
  wait_for(answers);  // lets other threads in, so nothing is written before
  read_one_clock([&] { copy_once(to); });
  for (const RemoteAnswer& answer : answers) {
    const std::vector<at::Tensor> found = remote()->wait(*answer, context_of_answer());
    const std::vector<TableShare> shares = layout().shares_of(answer->host);
    for (size_t i = 0; i < shares.size(); ++i)
      rows_of(to[static_cast<size_t>(shares[i].tensor)], shares[i]).copy_(found.at(i));
  }
  int64_t bytes = 0;
  for (const at::Tensor& tensor : to) bytes += static_cast<int64_t>(tensor.nbytes());
  session().counts().bytes_pulled += bytes;
}

void DenseTable::wait_for(const RemoteAnswers& answers) {
  for (const RemoteAnswer& answer : answers) remote()->wait(*answer, context_of_answer());
}

// Asks the other hosts, and waits until all hosts have reached the clock at which they were asked.
RemoteAnswers DenseTable::answers_of_one_clock() {
  for (;;) {
    RemoteAnswers answers;
    wait_to_read([&] { answers = ask_others(); });
    const uint64_t clock = board().clock();
    wait_for(answers);
    if (answers.empty() || board().clock() == clock) return answers;
  }
}

// Asks the other hosts for their shares, before it waits for this host's.
RemoteAnswers DenseTable::ask_others() {
  ShareRequest request;
  request.table = spread().index;
  return ask(request);
}

void DenseTable::fill_parameters(const RemoteAnswers& answers) {
  ++session().counts().pulls;
  session().count_dropped();
  if (bound_) return bound_->begin_reading();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& tensor : spec().tensors) parameters.push_back(tensor.detach());
  copy_values(parameters, answers);
  HostStore::bump_versions(spec().tensors);
}

void DenseTable::pull() {
  TRIREME_TRACE("ps.pull");
  const auto turn = session().enter("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  fill_parameters(answers_of_one_clock());
}

NamedTensors DenseTable::read(bool view, const RemoteAnswers& answers) {
  ++session().counts().pulls;
  session().count_dropped();
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < infos_.size(); ++i)
    tensors.push_back(view ? store_->whole(static_cast<int64_t>(i))
                           : at::empty(infos_[i].sizes, infos_[i].dtype));
  if (!view) copy_values(tensors, answers);
  return named(tensors);
}

NamedTensors DenseTable::named(const std::vector<at::Tensor>& tensors) const {
  NamedTensors named;
  for (size_t i = 0; i < infos_.size(); ++i) named.insert(infos_[i].name, tensors[i]);
  return named;
}

void DenseTable::check_view(bool view) const {
  TORCH_CHECK_VALUE(
      !view || board().options().backup == 0,
      error_text(kPsArea, "pull: got a view with backup workers, expected a copy", board().where(),
                 "A clock may be committed while a late worker reads."));
  TORCH_CHECK_VALUE(!view || remote() == nullptr,
                    error_text(kPsArea, "pull: got a view over hosts, expected a copy",
                               board().where(), "Other hosts have a part of the table."));
}

NamedTensors DenseTable::pull_tensors(bool view) {
  TRIREME_TRACE("ps.pull");
  const auto read_now = [&] {
    const auto turn = session().enter("pull");
    check_view(view);
    return read(view, answers_of_one_clock()).values();
  };
  return named(view || !may_be_in_checkpoint() ? read_now() : once_per_forward(read_now));
}

// --- push ----------------------------------------------------------------------------------------

at::Tensor DenseTable::checked_gradient(size_t index, const at::Tensor& gradient) const {
  if (!gradient.defined()) return {};
  const ParameterInfo& info = infos_[index];
  const auto refuse = [&](const std::string& got, const char* next_step) {
    TORCH_CHECK_VALUE(false,
                      error_text(kPsArea,
                                 c10::str("push: got a gradient of ", got, " for '", info.name,
                                          "' of table '", spec().name, "', expected ",
                                          dtype_name(info.dtype), " ", at::IntArrayRef(info.sizes)),
                                 board().where(), next_step));
  };
  if (gradient.unsafeGetTensorImpl()->is_python_dispatch())
    refuse("a subclass of Tensor", "Push a plain tensor: that of a DTensor is full_tensor().");
  if (gradient.layout() != at::kStrided)
    refuse(c10::str("layout ", gradient.layout()), "Make it dense: use sparse=False in its layer.");
  if (gradient.sizes() != at::IntArrayRef(info.sizes))
    refuse(c10::str("shape ", gradient.sizes()), "Push gradients of the tensors of the table.");
  if (gradient.scalar_type() != info.dtype && gradient.scalar_type() != at::kFloat)
    refuse(c10::str("dtype ", dtype_name(gradient.scalar_type())),
           "Cast it to that, or to float32.");
  if (info.dtype == at::kDouble && gradient.scalar_type() != info.dtype)
    return resolved(gradient.detach().to(at::kCPU, at::kDouble)).contiguous();
  return resolved(gradient.detach().to(at::kCPU)).contiguous();
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
    const at::Tensor* gradient = gradients.find(spec().names[i]);
    if (gradient == nullptr) continue;
    found[i] = checked_gradient(i, *gradient);
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

// Returns the gradients of a host's shares, as views.
DenseTable::Gradients DenseTable::gradients_of(int64_t host, const Gradients& gradients) const {
  Gradients found;
  for (const TableShare& share : layout().shares_of(host)) {
    const at::Tensor& whole = gradients[static_cast<size_t>(share.tensor)];
    found.push_back(whole.defined() ? rows_of(whole, share) : at::Tensor());
  }
  return found;
}

void DenseTable::push_to_others(const Gradients& gradients, double scale,
                                const WaitContext& context) {
  if (remote() == nullptr) return;
  ShareRequest request;
  request.verb = ShareRequest::Verb::kPush;
  request.table = spread().index;
  request.number = scale;
  for (const int64_t host : remote()->others())
    remote()->tell(host, request, gradients_of(host, gradients), context);
}

void DenseTable::push_here(const Gradients& own, double scale, const WaitContext& context) {
  is_bsp() ? steps_.deposit(own, scale) : steps_.step_now(own, scale, context);
}

// Pushes to all hosts; the place of the push is free. No other thread of this worker comes in
// between, so that the push is of one clock on all hosts.
void DenseTable::push_now(const Gradients& gradients, double scale) {
  const WaitContext context = this->context("push");
  if (remote() == nullptr) {
    push_here(gradients, scale, context);
  } else {
    push_here(gradients_of(layout().own_host, gradients), scale, context);
    push_to_others(gradients, scale, context);
  }
  int64_t bytes = 0;
  for (const at::Tensor& gradient : gradients)
    if (gradient.defined()) bytes += static_cast<int64_t>(gradient.nbytes());
  session().counts().bytes_pushed += bytes;
}

void DenseTable::push(double scale) {
  TRIREME_TRACE("ps.push");
  const auto turn = session().enter("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  finish_pushes();
  // Gradients that other threads add to .grad during this wait belong to this push, too.
  wait_to_push();
  const Gradients gradients = take_own_gradients();
  if (begin_push()) push_now(gradients, scale);
  for (const at::Tensor& tensor : spec().tensors) tensor.mutable_grad() = at::Tensor();
}

void DenseTable::push_tensors(const NamedTensors& gradients, double scale) {
  TRIREME_TRACE("ps.push");
  const auto turn = session().enter("push");
  if (bound_) bound_->check_unchanged("push");
  const Gradients found = gradients_by_name(gradients);
  finish_pushes();
  if (begin_push()) push_now(found, scale);
}

// --- what returns at once ------------------------------------------------------------------------

Pending DenseTable::push_or_keep(Gradients gradients, double scale) {
  if (can_push()) {
    finish_pushes();
    if (begin_push()) push_now(gradients, scale);
    return {};
  }
  for (at::Tensor& gradient : gradients)
    if (gradient.defined()) gradient = gradient.clone();  // the caller may write its own tensor
  return push_later(
      [this, gradients = std::move(gradients), scale] { push_now(gradients, scale); });
}

Pending DenseTable::pull_async() {
  const auto turn = session().enter("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  const RemoteAnswers answers = ask_others();
  return pull_later(
      [this, answers] {
        fill_parameters(answers);
        return std::vector<at::Tensor>();
      },
      [this, answers] { return have_come(answers); });
}

Pending DenseTable::pull_tensors_async(bool view) {
  if (!view && is_checkpoint_under_way()) return pulled(pull_tensors().values());
  const auto turn = session().enter("pull");
  check_view(view);
  const RemoteAnswers answers = ask_others();
  return pull_later([this, view, answers] { return read(view, answers).values(); },
                    [this, answers] { return have_come(answers); });
}

Pending DenseTable::push_async(double scale) {
  const auto turn = session().enter("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  Gradients gradients = take_own_gradients();
  for (const at::Tensor& tensor : spec().tensors) tensor.mutable_grad() = at::Tensor();
  return push_or_keep(std::move(gradients), scale);
}

Pending DenseTable::push_tensors_async(const NamedTensors& gradients, double scale) {
  const auto turn = session().enter("push");
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

void DenseTable::refuse_inside_writing(std::string_view verb, const char* next_step) const {
  TORCH_CHECK(!bound_->is_writing(),
              error_text(kPsArea,
                         c10::str(verb, ": got a call inside of writing() of table '", spec().name,
                                  "', when all workers stand still"),
                         board().where(), next_step));
}

void DenseTable::begin_writing() {
  const at::NoGradGuard no_grad;
  const auto turn = session().enter("writing");
  TORCH_CHECK_VALUE(bound_,
                    error_text(kPsArea,
                               c10::str("writing: got table '", spec().name,
                                        "', expected one whose module lies in its memory"),
                               board().where(),
                               "Write them before the server is made, or push what changes them."));
  bound_->check_unchanged("writing");
  refuse_inside_writing("writing", "Write inside the one that has begun.");
  bound_->begin_writing([this] { steps_.bring_to(board().clock(), context("writing")); });
  bound_->begin_reading();
}

void DenseTable::end_writing() {
  const auto turn = session().enter("writing");
  bound_->end_writing();
}

void DenseTable::abandon_writing(const std::string& reason) noexcept {
  if (session().is_forked()) return;
  const WorkerLock::Kept turn(board().worker_lock());
  if (bound_) bound_->abandon_writing(reason);
}

// --- for the server ------------------------------------------------------------------------------

void DenseTable::before_clock() {
  if (bound_) {
    bound_->check_unchanged("clock");
    refuse_inside_writing("clock", "Call clock() before or behind it.");
  }
  Table::before_clock();
}

void DenseTable::after_clock() {
  if (bound_) bound_->end_reading();
  Table::after_clock();
}

// --- saving --------------------------------------------------------------------------------------

std::vector<at::Tensor> DenseTable::share_tensors() const { return checkpoint().share_tensors(); }

size_t DenseTable::count_share_tensors(int64_t host) const {
  return checkpoint().count_share_tensors(host);
}

CheckpointContent DenseTable::content(const std::string& prefix, const SharesByHost& shares) const {
  return checkpoint().content(prefix, shares);
}

CheckpointContent DenseTable::expected_of(const CheckpointReader& /*reader*/,
                                          const std::string& prefix) const {
  return checkpoint().described(prefix);
}

CheckpointContent DenseTable::places(const std::string& prefix) const {
  return checkpoint().places(prefix);
}

void DenseTable::read_rest(const CheckpointReader& reader) { checkpoint().read_rest(reader); }

void DenseTable::drop_pushes() {
  Table::drop_pushes();
  if (is_bsp()) steps_.forget_deposit();
}

void DenseTable::note_loaded() {
  Table::note_loaded();
  if (bound_) bound_->end_reading();
}

void DenseTable::release_module() {
  keeps_.reset();
  if (!bound_) return;
  bound_->abandon_writing("it has closed its server");
  // The parameters get memory of their own, also if a wait throws.
  const auto release = c10::make_scope_exit([this] {
    bound_->unbind();
    bound_.reset();
  });
  if (bound_->is_readable()) return;
  // One more clock may be committed and applied while the parameters are copied; a further one
  // cannot, because this worker has not clocked it.
  steps_.bring_to(board().committed(), context("close"));
  const uint64_t before = steps_.applied();
  bound_->unbind();
  if (board().committed() == before) return;
  steps_.bring_to(board().committed(), context("close"));
  bound_->refresh();
}

}  // namespace trireme::ps
