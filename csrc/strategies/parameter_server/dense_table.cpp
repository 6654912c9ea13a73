#include <trireme/strategies/parameter_server/dense_table.h>

#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/worker_desk.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

namespace trireme::ps {
namespace {

bool lies_as_in_table(const at::Tensor& tensor, const at::Tensor& value) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == value.scalar_type();
}

}  // namespace

DenseTable::DenseTable(TableSteps::Parts parts, TablePlan plan, std::shared_ptr<WorkerDesk> desk,
                       bool binds_module)
    : spec_(parts.spec),
      board_(parts.board),
      store_(parts.store),
      desk_(std::move(desk)),
      steps_(std::move(parts), std::move(plan)),
      staleness_(
          static_cast<uint64_t>(spec_->options.staleness.value_or(board_->options().staleness))) {
  if (binds_module)
    bound_.emplace(BoundModule::Parts{spec_->name, spec_->names, spec_->tensors, store_, board_,
                                      steps_.memory()});
}

int64_t DenseTable::memory_bytes() const {
  return HostStore::bytes_for(store_->parameters(), store_->where().world) + steps_.plan().bytes;
}

Errand DenseTable::errand(std::string_view cause) const {
  return {[this, cause] {
            return c10::str(cause, " of table '", spec_->name, "' at clock ", board_->clock());
          },
          cause, -1, board_->clock()};
}

void DenseTable::require_module(std::string_view verb) const {
  TORCH_CHECK_VALUE(spec_->is_module,
                    error_text(kPsArea,
                               c10::str(verb, ": got table '", spec_->name,
                                        "' made of tensors, expected one made of a module"),
                               board_->where(), "Pull its tensors, and push gradients by name."));
}

// --- pull ----------------------------------------------------------------------------------------

// Says whether a pull of that clock need not wait for another worker.
bool DenseTable::has_come(uint64_t clock) const {
  if (board_->options().mode == Mode::kBsp) return steps_.applied() >= clock;
  if (board_->options().mode == Mode::kAsync || clock <= staleness_) return true;
  for (int64_t worker = 0; worker < board_->workers(); ++worker)
    if (!board_->is_gone(worker) && board_->clock_of(worker) < clock - staleness_) return false;
  return true;
}

void DenseTable::wait_for(uint64_t clock) {
  Errand errand = this->errand("pull");
  board_->check_peers(errand);
  if (board_->options().mode == Mode::kBsp) return steps_.bring_to(clock, errand);
  if (board_->options().mode == Mode::kAsync || clock <= staleness_) return;
  errand.clock = clock - staleness_;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    errand.worker = worker;
    board_->wait_clock(worker, errand.clock, errand);
  }
}

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

// Copies values of one clock. With backup a clock may close while this worker reads: then it reads
// again.
void DenseTable::copy_values(const std::vector<at::Tensor>& to) {
  const bool may_move = board_->options().backup > 0;
  for (;;) {
    if (may_move) steps_.bring_to(board_->closed(), errand("pull"));
    const uint64_t before = steps_.applied();
    copy_once(to);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!may_move || board_->closed() == before) break;
  }
  int64_t bytes = 0;
  for (const at::Tensor& one : to) bytes += static_cast<int64_t>(one.nbytes());
  desk_->counts().bytes_pulled += bytes;
}

void DenseTable::fill_parameters() {
  ++desk_->counts().pulls;
  desk_->settle();
  if (bound_) return bound_->begin_reading();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& one : spec_->tensors) parameters.push_back(one.detach());
  copy_values(parameters);
  HostStore::bump_versions(spec_->tensors);
}

void DenseTable::pull() {
  TRIREME_TRACE("ps.pull");
  desk_->check_worker("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  wait_for(board_->clock());
  fill_parameters();
}

NamedTensors DenseTable::read(bool view) {
  ++desk_->counts().pulls;
  desk_->settle();
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
  TORCH_CHECK_VALUE(!view || board_->options().backup == 0,
                    error_text(kPsArea, "pull: got a view with backup workers, expected a copy",
                               board_->where(), "A clock may close while a late worker reads."));
}

NamedTensors DenseTable::pull_tensors(bool view) {
  TRIREME_TRACE("ps.pull");
  desk_->check_worker("pull");
  check_view(view);
  wait_for(board_->clock());
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
                                   "' of table '", spec_->name, "', expected ", info.dtype, " ",
                                   at::IntArrayRef(info.sizes)),
                          board_->where(), next_step));
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
  for (size_t i = 0; i < spec_->tensors.size(); ++i)
    gradients.push_back(checked_gradient(i, spec_->tensors[i].grad()));
  return gradients;
}

DenseTable::Gradients DenseTable::gradients_by_name(const NamedTensors& gradients) const {
  Gradients found(spec_->names.size());
  size_t known = 0;
  for (size_t i = 0; i < spec_->names.size(); ++i) {
    const at::Tensor* one = gradients.find(spec_->names[i]);
    if (one == nullptr) continue;
    found[i] = checked_gradient(i, *one);
    ++known;
  }
  for (const auto& item : gradients) {
    if (known == gradients.size()) break;
    const auto& names = spec_->names;
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), item.key()) != names.end(),
                      error_text(kPsArea,
                                 c10::str("push: got a gradient of '", item.key(),
                                          "', expected names of table '", spec_->name, "'"),
                                 board_->where(), "Name tensors of the table."));
  }
  return found;
}

// Says whether a push of this clock finds its place free.
bool DenseTable::can_push() const {
  return board_->options().mode != Mode::kBsp || board_->clock() == 0 ||
         steps_.applied() >= board_->clock() - 1;
}

void DenseTable::push_gradients(const Gradients& gradients, double scale) {
  const Errand errand = this->errand("push");
  if (board_->options().mode == Mode::kBsp) {
    if (!can_push()) steps_.bring_to(board_->clock() - 1, errand);
    if (!desk_->count_push()) return;
    steps_.deposit(gradients, scale);
  } else {
    desk_->count_push();
    steps_.step_now(gradients, scale, errand);
  }
  int64_t bytes = 0;
  for (const at::Tensor& one : gradients)
    if (one.defined()) bytes += static_cast<int64_t>(one.nbytes());
  desk_->counts().bytes_pushed += bytes;
}

void DenseTable::push(double scale) {
  TRIREME_TRACE("ps.push");
  desk_->check_worker("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  finish_pushes();
  push_gradients(take_own_gradients(), scale);
  for (const at::Tensor& one : spec_->tensors) one.mutable_grad() = at::Tensor();
}

void DenseTable::push_tensors(const NamedTensors& gradients, double scale) {
  TRIREME_TRACE("ps.push");
  desk_->check_worker("push");
  if (bound_) bound_->check_unchanged("push");
  finish_pushes();
  push_gradients(gradients_by_name(gradients), scale);
}

void DenseTable::set_lr(double lr) {
  desk_->check_worker("set_lr");
  TORCH_CHECK_VALUE(
      has_learning_rate(spec_->optimizer) && lr >= 0 && std::isfinite(lr),
      error_text(kPsArea,
                 c10::str("set_lr: got ", lr, " for table '", spec_->name, "' under ",
                          to_string(spec_->optimizer), ", expected lr >= 0 of an optimizer"),
                 board_->where(), "Pass another one."));
  TORCH_CHECK_VALUE(
      board_->options().backup == 0,
      error_text(kPsArea,
                 c10::str("set_lr: got table '", spec_->name,
                          "' with backup workers, whose clocks may close without this worker"),
                 board_->where(), "Give the learning rate to the optimizer, or use no backup."));
  steps_.set_learning_rate(lr, errand("push"));
}

// --- what returns at once ------------------------------------------------------------------------

void DenseTable::check_async(uint64_t clock, std::string_view verb) const {
  desk_->check_worker(verb);
  TORCH_CHECK(board_->options().mode != Mode::kBsp || board_->clock() == clock,
              error_text(kPsArea,
                         c10::str("wait() for a ", verb, " of table '", spec_->name,
                                  "': got it at clock ", board_->clock(), ", expected it at clock ",
                                  clock, ", where the ", verb, " was asked for"),
                         board_->where(), "Wait for it before clock()."));
}

class DenseTable::Pull final : public Pending::State {
 public:
  Pull(DenseTable& table, bool fills, bool view)
      : table_(table), clock_(table.board_->clock()), fills_(fills), view_(view) {
    table_.board_->check_peers(table_.errand("pull"));
    if (table_.has_come(clock_)) finish();
  }
  bool done() const override { return is_finished_ || table_.has_come(clock_); }
  void wait() override {
    if (is_finished_) return;
    table_.check_async(clock_, "pull");
    table_.wait_for(clock_);
    finish();
  }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  void finish() {
    if (fills_) {
      table_.fill_parameters();
    } else {
      tensors_ = table_.read(view_).values();
    }
    is_finished_ = true;
  }

  DenseTable& table_;
  uint64_t clock_;
  bool fills_;
  bool view_;
  bool is_finished_ = false;
  std::vector<at::Tensor> tensors_;
};

// Is a push whose place was not free yet. The table keeps it until it is done, at the latest in
// clock(), so that one that nobody waits for is not lost.
struct DenseTable::OpenPush {
  uint64_t clock;
  Gradients gradients;
  double scale;
  bool is_finished = false;
};

class DenseTable::Push final : public Pending::State {
 public:
  Push(DenseTable& table, Gradients gradients, double scale)
      : table_(table),
        push_(std::make_shared<OpenPush>(
            OpenPush{table.board_->clock(), std::move(gradients), scale})) {
    if (table_.can_push()) {
      table_.finish(*push_);
      return;
    }
    for (at::Tensor& one : push_->gradients)
      if (one.defined()) one = one.clone();  // the caller may write what he gave
    table_.open_pushes_.push_back(push_);
  }
  bool done() const override { return push_->is_finished || table_.can_push(); }
  void wait() override {
    if (push_->is_finished) return;
    table_.check_async(push_->clock, "push");
    table_.finish_pushes();
  }

 private:
  DenseTable& table_;
  std::shared_ptr<OpenPush> push_;
};

void DenseTable::finish(OpenPush& push) {
  push_gradients(push.gradients, push.scale);
  push.is_finished = true;
  push.gradients.clear();
}

// Does them in their order.
void DenseTable::finish_pushes() {
  while (!open_pushes_.empty()) {
    finish(*open_pushes_.front());
    open_pushes_.pop_front();
  }
}

Pending DenseTable::pull_async() {
  desk_->check_worker("pull");
  require_module("pull");
  if (bound_) bound_->check_unchanged("pull");
  return Pending(std::make_unique<Pull>(*this, /*fills=*/true, /*view=*/false));
}

Pending DenseTable::pull_tensors_async(bool view) {
  desk_->check_worker("pull");
  check_view(view);
  return Pending(std::make_unique<Pull>(*this, /*fills=*/false, view));
}

Pending DenseTable::push_async(double scale) {
  desk_->check_worker("push");
  require_module("push");
  if (bound_) bound_->check_unchanged("push");
  Gradients gradients = take_own_gradients();
  for (const at::Tensor& one : spec_->tensors) one.mutable_grad() = at::Tensor();
  return Pending(std::make_unique<Push>(*this, std::move(gradients), scale));
}

Pending DenseTable::push_tensors_async(const NamedTensors& gradients, double scale) {
  desk_->check_worker("push");
  if (bound_) bound_->check_unchanged("push");
  return Pending(std::make_unique<Push>(*this, gradients_by_name(gradients), scale));
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
  desk_->check_worker("writing");
  TORCH_CHECK_VALUE(bound_,
                    error_text(kPsArea,
                               c10::str("writing: got table '", spec_->name,
                                        "', expected one whose module lies in its memory"),
                               board_->where(),
                               "Write them before the server is made, or push what changes them."));
  bound_->check_unchanged("writing");
  bound_->meet_writers();
  steps_.bring_to(board_->clock(), errand("writing"));
  bound_->begin_writing();
  bound_->begin_reading();
}

void DenseTable::end_writing() {
  desk_->check_worker("writing");
  bound_->end_writing();
}

void DenseTable::abandon_writing(const std::string& reason) noexcept {
  if (bound_) bound_->abandon_writing(reason);
}

// --- for the server ------------------------------------------------------------------------------

void DenseTable::before_clock() {
  if (bound_) bound_->check_unchanged("clock");
  finish_pushes();
  if (board_->options().mode == Mode::kBsp) steps_.carry_learning_rate(errand("clock"));
}

void DenseTable::after_clock() {
  if (bound_) bound_->end_reading();
  if (board_->options().mode == Mode::kBsp) steps_.apply_closed();
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
  steps_.bring_to(board_->closed(), errand("close"));
  const uint64_t before = steps_.applied();
  bound_->unbind();
  if (board_->closed() == before) return;
  steps_.bring_to(board_->closed(), errand("close"));
  bound_->refresh();
}

}  // namespace trireme::ps
