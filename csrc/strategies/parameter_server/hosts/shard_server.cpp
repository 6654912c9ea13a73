#include <trireme/strategies/parameter_server/hosts/shard_server.h>

#include <trireme/common/duration.h>
#include <trireme/common/exception_text.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/parameter_server/dense_table.h>
#include <trireme/strategies/parameter_server/hosts/shard_messages.h>
#include <trireme/strategies/parameter_server/sparse_table.h>
#include <trireme/strategies/parameter_server/worker_session.h>
#include <trireme/strategies/parameter_server/worker_tables.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

// See [Note: a rank that stands for workers of other hosts] in shard_server.h.

namespace trireme::ps {
namespace {

using Tensors = std::vector<at::Tensor>;
using Verb = ShareRequest::Verb;

// Treats a malformed request as the worker's failure.
ShareRequest request_or_failure(const std::string& text) {
  try {
    return share_request_of(text);
  } catch (const std::exception& error) {
    ShareRequest failure;
    failure.verb = Verb::kLeave;
    failure.state = LineState::kFailed;
    failure.word = what_of(error);
    return failure;
  }
}

}  // namespace

// The stand-in for one worker of another host.
class ShardServer::ClientSession {
 public:
  struct Task {
    ShareRequest request;
    Tensors tensors;
  };

  ClientSession(ShardServer& server, const Options& options, const Worker& worker)
      : server_(server), rank_(worker.rank) {
    ProgressTable::Request request;
    request.memory = server.parts_.memory->board();
    request.keeps_memory = server.parts_.memory;
    request.options = options;
    request.plan = server.parts_.memory->plan().board;
    request.line = worker.number;
    request.where = server.parts_.where;
    request.elsewhere = ProgressTable::Request::Elsewhere{worker.rank, worker.pid};
    tables_.board = std::make_shared<ProgressTable>(std::move(request));
  }
  ~ClientSession() { join(); }
  ClientSession(const ClientSession&) = delete;
  ClientSession& operator=(const ClientSession&) = delete;

  int64_t rank() const { return rank_; }
  const WorkerTables& tables() const { return tables_; }

  void make_tables() {
    tables_.board->watch_peers();
    HostTablesRequest request;
    request.memory = server_.parts_.memory;
    request.board = tables_.board;
    tables_ = make_host_tables(request);
  }
  void start() {
    thread_ = std::thread([this] { work(); });
  }
  void give(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    has_task_.notify_one();
  }
  void join() noexcept {
    if (thread_.joinable()) thread_.join();
  }
  // Ends the thread's waits, and the thread when all tasks that have come are answered.
  void end() noexcept {
    tables_.board->worker_lock().end_for_others();
    tables_.board->ring_all();
    const std::lock_guard lock(mutex_);
    ends_ = true;
    has_task_.notify_one();
  }

 private:
  void work() {
    for (Task task; next(task);) {
      answer(task);
      if (task.request.verb == Verb::kLeave) return;
    }
  }
  // Waits for a task; returns false when none will come.
  bool next(Task& task) {
    std::unique_lock lock(mutex_);
    has_task_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty()) return false;
    task = std::move(tasks_.front());
    tasks_.pop_front();
    return true;
  }
  // Performs a task, and answers if an answer is wanted.
  void answer(const Task& task) {
    ShareAnswer answer{task.request.ticket, failed_};
    Tensors tensors;
    if (failed_.empty() || task.request.verb == Verb::kLeave) {
      try {
        tensors = perform(task);
      } catch (const std::exception& error) {
        answer.error = what_of(error);
        if (answer.ticket < 0) failed_ = answer.error;
      }
    }
    if (answer.ticket >= 0) post(answer, tensors);
  }
  Tensors perform(const Task& task) {
    const ShareRequest& request = task.request;
    switch (request.verb) {
      case Verb::kPull:
        return pull(task);
      case Verb::kPush:
        push(task);
        return {};
      case Verb::kSetRate:
        table(request).set_lr(request.number);
        return {};
      case Verb::kClock:
        tables_.clock();
        return {};
      case Verb::kIds:
        return {sparse(request).ids()};
      case Verb::kSave:
        return share_to_save();
      case Verb::kLeave:
        leave(request);
        return {};
    }
    TORCH_CHECK_VALUE(false, error_text(kPsArea, "got a message between hosts of an unknown verb",
                                        server_.parts_.where, "Use one version of Trireme."));
  }
  Table& table(const ShareRequest& request) const {
    return *tables_.tables.at(static_cast<size_t>(request.table));
  }
  SparseTable& sparse(const ShareRequest& request) const {
    return dynamic_cast<SparseTable&>(table(request));
  }
  Tensors pull(const Task& task) const {
    if (auto* dense = dynamic_cast<DenseTable*>(&table(task.request)))
      return dense->pull_tensors().values();
    return {sparse(task.request).pull(task.tensors.at(0), task.request.create)};
  }
  void push(const Task& task) const {
    auto* dense = dynamic_cast<DenseTable*>(&table(task.request));
    if (dense == nullptr)
      return sparse(task.request).push(task.tensors.at(0), task.tensors.at(1), task.request.number);
    NamedTensors gradients;
    for (size_t i = 0; i < dense->tensor_names().size(); ++i)
      if (task.tensors.at(i).defined()) gradients.insert(dense->tensor_names()[i], task.tensors[i]);
    dense->push_tensors(gradients, task.request.number);
  }
  // Meets the workers of this host; returns this host's shares of all tables if the worker is the
  // first.
  Tensors share_to_save() const {
    Tensors tensors;
    save_together(tables_, [&] {
      for (const auto& table : tables_.tables)
        for (const at::Tensor& tensor : table->share_tensors()) tensors.push_back(tensor.clone());
    });
    return tensors;
  }
  void leave(const ShareRequest& request) const {
    tables_.session->note_left();
    tables_.board->leave(request.state, request.word);
  }
  // Sends an answer; waits for room as long as the worker lives.
  void post(const ShareAnswer& answer, const Tensors& tensors) const {
    TensorMessage message;
    message.text = to_text(answer);
    message.tensors = tensors;
    MessageBox& box = *server_.parts_.box;
    try {
      shm::FutexWait(box.futex()).until([&] {
        return box.try_post(rank_, message, "an answer") || server_.is_stopping_;
      });
    } catch (const std::exception&) {
      // The worker has gone: take_messages() notices.
    }
  }

  ShardServer& server_;
  int64_t rank_;
  WorkerTables tables_;
  std::string failed_;  // the error of a request without an answer
  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<Task> tasks_;
  bool ends_ = false;
  std::thread thread_;
};

ShardServer::ShardServer(Parts parts, const Options& options, const std::vector<Worker>& workers)
    : parts_(std::move(parts)) {
  for (const Worker& worker : workers)
    sessions_.push_back(std::make_unique<ClientSession>(*this, options, worker));
}

ShardServer::~ShardServer() { stop(); }

void ShardServer::make_tables() {
  for (const auto& session : sessions_) session->make_tables();
}

const WorkerTables* ShardServer::first_tables() const {
  return sessions_.empty() ? nullptr : &sessions_.front()->tables();
}

ShardServer::ClientSession* ShardServer::session_of(int64_t rank) {
  for (const auto& session : sessions_)
    if (session->rank() == rank) return session.get();
  return nullptr;
}

void ShardServer::start() {
  if (thread_.joinable()) return;
  for (const auto& session : sessions_) session->start();
  thread_ = std::thread([this] { take_messages(); });
}

void ShardServer::give(int64_t rank, const TensorMessage& message) {
  ClientSession* session = session_of(rank);
  if (session == nullptr) return;
  session->give({request_or_failure(message.text), message.tensors});
}

bool ShardServer::take_arrivals() {
  const std::vector<MessageBox::Arrival> arrivals = parts_.box->take_arrivals();
  for (const MessageBox::Arrival& arrival : arrivals) give(arrival.from, arrival.message);
  return !arrivals.empty();
}

void ShardServer::note_gone() {
  for (const int64_t rank : parts_.box->look()) {
    ClientSession* session = session_of(rank);
    if (session == nullptr) continue;
    ShareRequest gone;
    gone.verb = Verb::kLeave;
    gone.state = LineState::kLost;
    gone.word = parts_.box->why_gone(rank).value_or("nobody knows why");
    session->give({gone, {}});
  }
}

void ShardServer::take_messages() {
  shm::LookTimer looks(shm::Clock::now());
  shm::FutexWait(parts_.box->futex()).until([&] {
    const bool any = take_arrivals();
    looks.call_if_due(shm::Clock::now(), [this] { note_gone(); });
    if (is_stopping_) return shm::Found::kAll;
    return any ? shm::Found::kSome : shm::Found::kNothing;
  });
}

void ShardServer::close(std::string_view error) noexcept {
  stop();
  TensorMessage word;
  word.text = to_text(ShareAnswer{-1, std::string(error)});
  for (const auto& session : sessions_) {
    try {
      if (!error.empty() && !parts_.box->why_gone(session->rank()))
        parts_.box->try_post(session->rank(), word, "the last word");
      if (!parts_.box->why_gone(session->rank())) parts_.box->try_end(session->rank());
    } catch (const std::exception&) {
      // The worker has gone.
    }
  }
  const auto deadline = deadline_after(parts_.limit);
  shm::LookTimer looks;
  shm::FutexWait(parts_.box->futex())
      .until([this] { return parts_.box->is_drained(); },
             [&] {
               const auto now = shm::Clock::now();
               looks.call_if_due(now, [this] { parts_.box->look(); });
               return now >= deadline;
             });
}

void ShardServer::stop() noexcept {
  const std::lock_guard lock(stopping_);
  if (!thread_.joinable()) return;
  for (const auto& session : sessions_) session->end();
  for (const auto& session : sessions_) session->join();
  is_stopping_ = true;
  parts_.box->wake();
  thread_.join();
}

}  // namespace trireme::ps
