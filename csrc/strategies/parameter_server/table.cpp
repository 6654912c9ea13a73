#include <trireme/strategies/parameter_server/table.h>

#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/worker_session.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace trireme::ps {

// A push that is kept until it is done, at the latest in clock(), so that it is not lost without a
// wait().
struct Table::OpenPush {
  uint64_t clock;
  std::function<void()> push;         // null once it is done
  std::optional<bool> is_taken = {};  // the result of WorkerSession::count_push()
};

Table::Table(std::shared_ptr<const TableSpec> spec, std::shared_ptr<ProgressTable> board,
             std::shared_ptr<WorkerSession> session, Spread spread)
    : spec_(std::move(spec)),
      board_(std::move(board)),
      session_(std::move(session)),
      spread_(std::move(spread)),
      staleness_(
          static_cast<uint64_t>(spec_->options.staleness.value_or(board_->options().staleness))) {}

Table::~Table() = default;

bool Table::is_bsp() const { return board_->options().mode == Mode::kBsp; }

WaitContext Table::context(std::string_view cause) const {
  return {[this, cause] {
            return c10::str(cause, " of table '", spec_->name, "' at clock ", board_->clock());
          },
          cause, -1, board_->clock()};
}

WaitContext Table::context_of_answer() const {
  WaitContext pull = context("pull");
  pull.lets_others_in = true;
  return pull;
}

void Table::set_lr(double lr) {
  const auto turn = session_->enter("set_lr");
  TORCH_CHECK_VALUE(
      has_learning_rate(spec_->optimizer) && lr >= 0 && std::isfinite(lr),
      error_text(kPsArea,
                 c10::str("set_lr: got ", lr, " for table '", spec_->name, "' under ",
                          to_string(spec_->optimizer), ", expected lr >= 0 of an optimizer"),
                 board_->where(), "Pass another one."));
  TORCH_CHECK_VALUE(
      board_->options().backup == 0,
      error_text(
          kPsArea,
          c10::str("set_lr: got table '", spec_->name,
                   "' with backup workers, whose clocks may be committed without this worker"),
          board_->where(), "Give the learning rate to the optimizer, or use no backup."));
  if (remote() == nullptr) return own_steps().set_learning_rate(lr, context("push"));
  // From here on no other thread comes in between, so that the rate is of one clock on all hosts.
  wait_to_push();
  finish_pushes();
  own_steps().set_learning_rate(lr, context("push"));
  ShareRequest request;
  request.verb = ShareRequest::Verb::kSetRate;
  request.table = spread_.index;
  request.number = lr;
  remote()->tell_all(request, context("push"));
}

void Table::before_clock() {
  finish_pushes();
  if (is_bsp()) own_steps().carry_learning_rate(context("clock"));
}

void Table::after_clock() {
  if (is_bsp()) own_steps().apply_committed();
}

// --- saving --------------------------------------------------------------------------------------

void Table::prepare_meeting() { Table::before_clock(); }

void Table::drop_pushes() {
  for (const auto& open_push : open_pushes_) open_push->push = nullptr;
  open_pushes_.clear();
}

void Table::bring_to_committed() {
  if (is_bsp()) own_steps().bring_to(board_->committed(), context("pull"));
}

void Table::note_loaded() { own_steps().forget_learning_rate(); }

// --- pulls ---------------------------------------------------------------------------------------

RemoteAnswers Table::ask(const ShareRequest& request) const {
  RemoteAnswers answers;
  if (remote() == nullptr) return answers;
  for (const int64_t host : remote()->others())
    answers.push_back(remote()->ask(host, request, {}, context("pull")));
  return answers;
}

bool Table::have_come(const RemoteAnswers& answers) const {
  return std::all_of(answers.begin(), answers.end(), [this](const RemoteAnswer& answer) {
    return remote()->has_come(*answer, context("pull"));
  });
}

bool Table::has_come(uint64_t clock) const {
  if (is_bsp()) return steps().applied() >= clock;
  if (board_->options().mode == Mode::kAsync || clock <= staleness_) return true;
  for (int64_t worker = 0; worker < board_->workers(); ++worker)
    if (!board_->is_gone(worker) && board_->clock_of(worker) < clock - staleness_) return false;
  return true;
}

void Table::wait_for(uint64_t clock) {
  WaitContext context = this->context("pull");
  board_->check_peers(context);
  if (is_bsp()) return own_steps().bring_to(clock, context);
  if (board_->options().mode == Mode::kAsync || clock <= staleness_) return;
  context.clock = clock - staleness_;
  context.lets_others_in = true;
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    context.worker = worker;
    board_->wait_clock(worker, context.clock, context);
  }
}

void Table::read_one_clock(const std::function<void()>& read) {
  if (board_->options().backup == 0) return read();
  const WaitContext context = this->context("pull");
  for (const auto deadline = board_->deadline();; board_->check_deadline(deadline, context)) {
    own_steps().bring_to(board_->committed(), context);
    const uint64_t before = steps().applied();
    read();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (board_->committed() == before) return;
  }
}

void Table::check_async(uint64_t clock, std::string_view verb) const {
  session_->check_worker(verb);
  TORCH_CHECK(!is_bsp() || board_->clock() == clock,
              error_text(kPsArea,
                         c10::str("wait() for a ", verb, " of table '", spec_->name,
                                  "': got it at clock ", board_->clock(), ", expected it at clock ",
                                  clock, ", where the ", verb, " was asked for"),
                         board_->where(), "Wait for it before clock()."));
}

class Table::Pull final : public Pending::State {
 public:
  Pull(Table& table, std::function<std::vector<at::Tensor>()> read,
       std::function<bool()> has_answers)
      : table_(table),
        clock_(table.board_->clock()),
        read_(std::move(read)),
        has_answers_(std::move(has_answers)) {
    table_.board_->check_peers(table_.context("pull"));
    if (need_not_wait()) finish();
  }
  bool done() const override {
    const auto turn = table_.session_->turn();
    if (is_finished_ || table_.session_->is_closed() || need_not_wait()) return true;
    table_.board_->check_peers(table_.context("pull"));
    return false;
  }
  // Another thread may finish the pull while this one waits.
  void wait() override {
    const auto turn = table_.session_->turn();
    if (is_finished_) return;
    table_.check_async(clock_, "pull");
    table_.wait_for(clock_);
    if (is_finished_) return;
    table_.check_async(clock_, "pull");
    finish();
  }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  bool need_not_wait() const {
    return table_.has_come(clock_) && (!has_answers_ || has_answers_());
  }
  // Finishes the pull; with other hosts it waits for their answers, too.
  void finish() {
    const auto read = read_;
    std::vector<at::Tensor> tensors = read();
    if (is_finished_) return;
    tensors_ = std::move(tensors);
    is_finished_ = true;
    read_ = nullptr;
    has_answers_ = nullptr;
  }

  Table& table_;
  uint64_t clock_;
  std::function<std::vector<at::Tensor>()> read_;
  std::function<bool()> has_answers_;
  bool is_finished_ = false;
  std::vector<at::Tensor> tensors_;
};

Pending Table::pull_later(std::function<std::vector<at::Tensor>()> read,
                          std::function<bool()> has_answers) {
  return Pending(std::make_unique<Pull>(*this, std::move(read), std::move(has_answers)));
}

class Table::Pulled final : public Pending::State {
 public:
  explicit Pulled(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  bool done() const override { return true; }
  void wait() override {}
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

Pending Table::pulled(std::vector<at::Tensor> tensors) {
  return Pending(std::make_unique<Pulled>(std::move(tensors)));
}

// --- pushes --------------------------------------------------------------------------------------

bool Table::can_push() const {
  return !is_bsp() || board_->clock() == 0 || steps().applied() >= board_->clock() - 1;
}

void Table::wait_to_push() {
  while (!can_push()) own_steps().bring_to(board_->clock() - 1, context("push"));
}

bool Table::begin_push() {
  wait_to_push();
  return session_->count_push();
}

class Table::Push final : public Pending::State {
 public:
  Push(Table& table, std::shared_ptr<OpenPush> push) : table_(table), push_(std::move(push)) {}
  bool done() const override {
    const auto turn = table_.session_->turn();
    if (push_->push == nullptr || table_.session_->is_closed() || table_.can_push()) return true;
    table_.board_->check_peers(table_.context("push"));
    return false;
  }
  void wait() override {
    const auto turn = table_.session_->turn();
    if (push_->push == nullptr) return;
    table_.check_async(push_->clock, "push");
    table_.finish_pushes();
  }

 private:
  Table& table_;
  std::shared_ptr<OpenPush> push_;
};

Pending Table::push_later(std::function<void()> push) {
  open_pushes_.push_back(std::make_shared<OpenPush>(OpenPush{board_->clock(), std::move(push)}));
  return Pending(std::make_unique<Push>(*this, open_pushes_.back()));
}

void Table::finish_pushes() {
  while (!open_pushes_.empty()) {
    wait_to_push();
    if (open_pushes_.empty()) return;  // another thread has done the pushes meanwhile
    OpenPush& first = *open_pushes_.front();
    // A push that failed is done again; it is counted already.
    if (!first.is_taken) first.is_taken = session_->count_push();
    if (*first.is_taken) first.push();
    first.push = nullptr;
    open_pushes_.pop_front();
  }
}

}  // namespace trireme::ps
