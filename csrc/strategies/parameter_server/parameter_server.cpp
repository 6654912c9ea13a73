#include <trireme/strategies/parameter_server/parameter_server.h>

#include <trireme/comm/store_texts.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>
#include <trireme/common/trace.h>
#include <trireme/strategies/parameter_server/server_setup.h>
#include <trireme/strategies/parameter_server/table_checkpoint.h>
#include <trireme/strategies/parameter_server/worker_session.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <mutex>
#include <utility>

namespace trireme::ps {
namespace {

constexpr const char* kInvitation = "trireme/ps/invitation";

}  // namespace

ParameterServer::ParameterServer(Context& ctx, std::vector<TableSpec> tables,
                                 const Options& options)
    : ParameterServer(ctx.communicator(), std::move(tables), options) {}

ParameterServer::ParameterServer(std::shared_ptr<Communicator> communicator,
                                 std::vector<TableSpec> tables, const Options& options)
    : setup_(std::make_unique<ServerSetup>(std::move(communicator), std::move(tables), options)),
      here_(setup_->here()) {}

ParameterServer::ParameterServer(std::unique_ptr<ServerSetup> setup)
    : setup_(std::move(setup)), here_(setup_->here()) {}

ParameterServer::~ParameterServer() {
  do {
    try {
      close(std::uncaught_exceptions() > 0 ? "an exception, which its output shows" : "");
    } catch (const Interruption&) {  // a destructor cannot throw it
    }
  } while (!here_.session->is_closed() && !here_.session->is_forked());
}

std::optional<int64_t> ParameterServer::worker() const { return here_.board->worker(); }

int64_t ParameterServer::workers() const { return here_.board->workers(); }

int64_t ParameterServer::clock() {
  TRIREME_TRACE("ps.clock");
  const auto turn = here_.session->enter("clock");
  here_.clock();
  if (setup_->remote() != nullptr) {
    ShareRequest request;
    request.verb = ShareRequest::Verb::kClock;
    setup_->remote()->tell_all(request, {[] { return std::string("clock"); }, "push"});
  }
  return static_cast<int64_t>(here_.board->clock());
}

std::vector<int64_t> ParameterServer::clocks() const {
  here_.session->check_open("clocks");
  std::vector<int64_t> clocks;
  for (int64_t worker = 0; worker < here_.board->workers(); ++worker)
    clocks.push_back(static_cast<int64_t>(here_.board->clock_of(worker)));
  return clocks;
}

Stats ParameterServer::stats() const {
  here_.session->check_open("stats");
  Stats stats;
  stats.clocks = clocks();
  for (int64_t worker = 0; worker < here_.board->workers(); ++worker) {
    const LineState state = here_.board->state_of(worker);
    if (state == LineState::kLeft) stats.left.push_back(worker);
    if (has_broken_off(state)) stats.lost.push_back(worker);
    if (state != LineState::kHere) continue;
    const auto clock = stats.clocks[static_cast<size_t>(worker)];
    if (!stats.slowest || clock < stats.clocks[static_cast<size_t>(*stats.slowest)])
      stats.slowest = worker;
  }
  stats.waited = here_.board->wait_times().seconds();
  const WorkerCounts& counts = std::as_const(*here_.session).counts();
  stats.pulls = counts.pulls;
  stats.pushes = counts.pushes;
  stats.dropped = counts.dropped;
  stats.bytes_pulled = counts.bytes_pulled;
  stats.bytes_pushed = counts.bytes_pushed;
  for (const auto& table : here_.tables) {
    stats.torn += table->steps().count_torn(stats.torn_blocks);
    stats.memory_bytes += table->memory_bytes();
    stats.rows += table->count_rows();
  }
  return stats;
}

void ParameterServer::serve() {
  TRIREME_TRACE("ps.serve");
  here_.session->check_open("serve");
  TORCH_CHECK(!here_.board->worker(),
              error_text(kPsArea, "serve: got a rank that works, expected one that serves",
                         here_.board->where(), "Name it in Options::servers."));
  WaitContext context{[] { return std::string("serve"); }, "serve"};
  context.has_deadline = false;  // workers train for as long as they like
  if (setup_->shares() != nullptr) setup_->shares()->start();
  const auto stop = c10::make_scope_exit([this] {
    if (setup_->shares() != nullptr) setup_->shares()->stop();
  });
  try {
    for (int64_t worker = 0; worker < here_.board->workers(); ++worker) {
      context.worker = worker;
      here_.board->wait_clock(worker, WorkerLine::kGone, context);
    }
    const std::unique_lock turn(here_.board->worker_lock());
    here_.board->check_peers(context);
  } catch (const std::exception& error) {
    const WorkerLock::Kept turn(here_.board->worker_lock());
    // close() tells workers of other hosts this error; a close() by another thread is no error.
    if (!here_.board->worker_lock().is_ended_here()) ended_by_ = what_of(error);
    throw;
  }
}

// --- late workers --------------------------------------------------------------------------------

void ParameterServer::accept(const c10::intrusive_ptr<c10d::Store>& store) {
  here_.session->check_open("accept");
  TORCH_CHECK_VALUE(setup_->ranks().count() <= 1,
                    error_text(kPsArea,
                               c10::str("accept: got a server over ", setup_->ranks().count(),
                                        " hosts, expected one host"),
                               here_.board->where(), "Start with all workers."));
  const std::vector<std::string> addresses = setup_->memory().addresses();
  TORCH_CHECK(
      !addresses.empty(),
      error_text(kPsArea, "accept: got a host whose processes may not open each other's memory",
                 here_.board->where(), "Allow it (ptrace), or start with all workers."));
  put_text(store, kInvitation, to_text({setup_->memory().plan(), addresses}));
}

std::unique_ptr<ParameterServer> ParameterServer::join(
    const c10::intrusive_ptr<c10d::Store>& store) {
  auto setup = std::make_unique<ServerSetup>(invitation_of(get_text(store, kInvitation)));
  return std::unique_ptr<ParameterServer>(new ParameterServer(std::move(setup)));
}

void ParameterServer::refuse_without_group(std::string_view verb) const {
  TORCH_CHECK(
      setup_->communicator() != nullptr,
      error_text(kPsArea,
                 c10::str(verb, ": got a worker that has joined, expected a rank of the group"),
                 here_.board->where(), "Call it before workers join, on all ranks."));
}

// --- saving --------------------------------------------------------------------------------------

void ParameterServer::save(const std::string& path) {
  TRIREME_TRACE("ps.save");
  const auto turn = here_.session->enter("save");
  WaitContext context{[this] { return c10::str("save at clock ", here_.board->clock()); }, "save"};
  context.has_deadline = false;  // saving may take any time
  RemoteAnswers answers;
  if (setup_->remote() != nullptr) {
    // Kept pushes reach other hosts before the request to save.
    for (const auto& table : here_.tables) table->prepare_meeting();
    ShareRequest request;
    request.verb = ShareRequest::Verb::kSave;
    for (const int64_t host : setup_->remote()->others())
      answers.push_back(setup_->remote()->ask(host, request, {}, context));
  }
  save_together(here_, [&] {
    check_buffers_known();
    save_tables(path, here_.tables, shares_by_host(answers, context));
  });
  for (const RemoteAnswer& answer : answers) setup_->remote()->wait(*answer, context);
}

// Returns the shares of all hosts, by table; waits for the answers of other hosts.
std::vector<SharesByHost> ParameterServer::shares_by_host(const RemoteAnswers& answers,
                                                          const WaitContext& context) {
  std::vector<SharesByHost> shares;
  for (const auto& table : here_.tables) {
    shares.emplace_back(static_cast<size_t>(setup_->ranks().count()));
    shares.back()[static_cast<size_t>(setup_->ranks().own)] = table->share_tensors();
  }
  for (const RemoteAnswer& answer : answers) {
    const std::vector<at::Tensor> all = setup_->remote()->wait(*answer, context);
    auto next = all.begin();
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto count =
          static_cast<std::ptrdiff_t>(here_.tables[i]->count_share_tensors(answer->host));
      TORCH_CHECK(all.end() - next >= count,
                  error_text(kPsArea, "save: got fewer tensors of another host than it has",
                             here_.board->where(), "Use the same version of Trireme everywhere."));
      shares[i][static_cast<size_t>(answer->host)].assign(next, next + count);
      next += count;
    }
  }
  return shares;
}

void ParameterServer::check_may_load() const {
  const ProgressTable& board = *here_.board;
  for (int64_t worker = 0; worker < workers(); ++worker) {
    TORCH_CHECK_VALUE(!board.line(worker).has_joined() || board.is_gone(worker),
                      error_text(kPsArea,
                                 c10::str("load: got ", board.name_of(worker),
                                          ", expected ranks of the group alone"),
                                 board.where(), "Load before workers join."));
  }
  TORCH_CHECK_VALUE(
      setup_->ranks().count() == 1 || (board.clock() == 0 && here_.session->counts().pushes == 0),
      error_text(kPsArea,
                 c10::str("load: got a worker at clock ", board.clock(), " after ",
                          here_.session->counts().pushes.load(),
                          " pushes, expected a server that nobody has used yet"),
                 board.where(), "On several hosts load before the first push."));
}

void ParameterServer::check_clocks() const {
  const ProgressTable& board = *here_.board;
  for (int64_t worker = 0; worker < workers(); ++worker)
    TORCH_CHECK_VALUE(board.clock_of(worker) == board.clock_of(0),
                      error_text(kPsArea,
                                 c10::str("load: got ", board.name_of(worker), " at clock ",
                                          board.clock_of(worker), ", expected clock ",
                                          board.clock_of(0), ", where worker 0 is"),
                                 board.where(), "Load after as many clocks on all workers."));
}

void ParameterServer::load(const std::string& path) {
  TRIREME_TRACE("ps.load");
  const auto turn = here_.session->enter_open("load");
  refuse_without_group("load");
  const bool works = here_.board->worker().has_value();
  if (works) here_.session->check_worker("load");
  const CheckpointRanks ranks{setup_->communicator(), setup_->communicator()->device()};
  together(ranks, [&] {
    check_may_load();
    if (!works) return;
    for (const auto& table : here_.tables) table->drop_pushes();
  });
  together(ranks, [&] {
    check_clocks();
    if (!works) return;
    for (const auto& table : here_.tables) table->bring_to_committed();
  });
  const at::NoGradGuard no_grad;
  const WorkerTables* tables = setup_->loader();
  together(ranks, [&] {
    if (tables == nullptr) return;
    // Makes one learning rate hold for all workers, into which the checkpoint's is read then.
    for (const auto& table : tables->tables) table->adopt_learning_rate();
    load_tables(path, tables->tables, here_.board->where());
  });
  together(ranks, [&] {
    if (!works) return;
    if (tables == nullptr) load_buffers(path, here_.tables);
    for (const auto& table : here_.tables) table->note_loaded();
  });
}

// Throws ValueError on a worker that has joined if a table was made of a module: it lacks the
// buffers.
void ParameterServer::check_buffers_known() const {
  for (const auto& table : here_.tables)
    TORCH_CHECK_VALUE(!table->spec().has_module_elsewhere,
                      error_text(kPsArea,
                                 c10::str("save: got table '", table->name(),
                                          "' made of a module, which no worker that is left has, "
                                          "expected a rank of the group"),
                                 here_.board->where(), "Save while such a rank is there."));
}

// Returns what a signal handler has raised meanwhile.
std::exception_ptr ParameterServer::release_modules() noexcept {
  std::exception_ptr raised;
  for (const auto& table : here_.tables) {
    try {
      table->release_module();
    } catch (const Interruption&) {
      raised = std::current_exception();
    } catch (const std::exception& error) {
      TORCH_WARN(error_text(
          kPsArea, "while table '" + table->name() + "' let go of its module: " + error.what(),
          here_.board->where(), "Its values may be those of half a step."));
    }
  }
  return raised;
}

void ParameterServer::leave() {
  here_.session->check_open("leave");
  if (!here_.board->worker() || here_.session->has_left()) return;
  here_.board->worker_lock().end_for_others();
  here_.board->ring_all();
  const std::unique_lock turn(here_.board->worker_lock());
  if (here_.session->has_left()) return;
  const std::exception_ptr raised = release_modules();
  here_.session->note_left();
  here_.board->leave(LineState::kLeft, {});
  if (setup_->remote() != nullptr) setup_->remote()->leave(LineState::kLeft, {});
  if (raised) std::rethrow_exception(raised);
}

void ParameterServer::close(std::string_view error) {
  if (here_.session->is_closed() || here_.session->is_forked()) return;
  here_.board->worker_lock().end_for_others();
  here_.board->ring_all();
  const std::unique_lock turn(here_.board->worker_lock());
  if (here_.session->is_closed()) return;
  const bool works = here_.board->worker() && !here_.session->has_left();
  const std::exception_ptr raised = works ? release_modules() : nullptr;
  here_.session->note_closed();
  if (error.empty()) error = ended_by_;
  const LineState state = error.empty() ? LineState::kLeft : LineState::kFailed;
  here_.board->leave(state, error);
  if (works && setup_->remote() != nullptr) setup_->remote()->leave(state, error);
  if (setup_->shares() != nullptr) setup_->shares()->close(error);
  if (raised) std::rethrow_exception(raised);
}

std::vector<std::string> ParameterServer::table_names() const {
  std::vector<std::string> names;
  for (const auto& table : here_.tables) names.push_back(table->name());
  return names;
}

bool ParameterServer::is_sparse(std::string_view name) const {
  return find(name, "is_sparse")->spec().rows.has_value();
}

std::shared_ptr<Table> ParameterServer::find(std::string_view name, std::string_view verb) const {
  here_.session->check_open(verb);
  std::string known;
  for (const auto& table : here_.tables) {
    if (table->name() == name) return table;
    known += (known.empty() ? "'" : ", '") + table->name() + "'";
  }
  C10_THROW_ERROR(IndexError,
                  error_text(kPsArea, c10::str("got table '", name, "', expected one of ", known),
                             here_.board->where(), "Ask for a table of the server."));
}

void ParameterServer::refuse_kind(std::string_view name, const char* got, const char* expected) {
  C10_THROW_ERROR(IndexError, error_text(kPsArea,
                                         c10::str("got the ", got, " table '", name,
                                                  "', expected a ", expected, " one"),
                                         here_.board->where(), "Ask for it by its own kind."));
}

DenseTable& ParameterServer::dense(std::string_view name) {
  auto* table = dynamic_cast<DenseTable*>(find(name, "dense").get());
  if (table == nullptr) refuse_kind(name, "sparse", "dense");
  return *table;
}

SparseTable& ParameterServer::sparse(std::string_view name) { return *shared_sparse(name); }

std::shared_ptr<SparseTable> ParameterServer::shared_sparse(std::string_view name) {
  auto table = std::dynamic_pointer_cast<SparseTable>(find(name, "sparse"));
  if (table == nullptr) refuse_kind(name, "dense", "sparse");
  return table;
}

}  // namespace trireme::ps
