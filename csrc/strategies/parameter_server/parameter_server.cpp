#include <trireme/strategies/parameter_server/parameter_server.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/comm/store_texts.h>
#include <trireme/common/forks.h>
#include <trireme/common/trace.h>
#include <trireme/memory/host_store.h>
#include <trireme/shm/host_group.h>
#include <trireme/strategies/parameter_server/server_invitation.h>
#include <trireme/strategies/parameter_server/server_memory.h>
#include <trireme/strategies/parameter_server/table_agreement.h>
#include <trireme/strategies/parameter_server/table_checkpoint.h>
#include <trireme/strategies/parameter_server/worker_desk.h>
#include <trireme/strategies/parameter_server/worker_meeting.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme::ps {
namespace {

void check_host(Communicator& communicator) {
  if (communicator.world() == 1) return;
  Host* host = communicator.host();
  TORCH_CHECK_VALUE(
      host != nullptr && host->group().world() == communicator.world(),
      error_text(kPsArea, "got a group whose ranks do not share the memory of one host",
                 communicator.rank_of(),
                 "Use backend 'trireme' on one host; there are no servers between hosts yet."));
}

constexpr const char* kInvitation = "trireme/ps/invitation";
// So many workers may join a server.
constexpr int64_t kMostJoined = 64;

BoardPlan plan_board(const Roles& roles, const Options& options) {
  BoardPlan plan;
  plan.workers = static_cast<int64_t>(roles.workers.size());
  plan.most_workers = plan.workers + kMostJoined;
  if (options.backup > 0) plan.most_workers = std::min(plan.most_workers, kMostWithBackup);
  plan.servers = static_cast<int64_t>(roles.servers.size());
  return plan;
}

// Returns the line of this rank: workers come first, servers behind those that may join.
int64_t line_of(const Roles& roles, const BoardPlan& plan, int64_t rank) {
  const auto worker = std::find(roles.workers.begin(), roles.workers.end(), rank);
  if (worker != roles.workers.end()) return worker - roles.workers.begin();
  return plan.most_workers +
         (std::find(roles.servers.begin(), roles.servers.end(), rank) - roles.servers.begin());
}

bool lies_on_cpu(const TableSpec& table) {
  return std::all_of(table.tensors.begin(), table.tensors.end(),
                     [](const at::Tensor& one) { return one.is_cpu(); });
}

}  // namespace

ParameterServer::ParameterServer(Context& ctx, std::vector<TableSpec> tables,
                                 const Options& options)
    : ParameterServer(ctx.communicator(), std::move(tables), options) {}

ParameterServer::ParameterServer(std::shared_ptr<Communicator> communicator,
                                 std::vector<TableSpec> tables, const Options& options)
    : communicator_(std::move(communicator)) {
  check_host(*communicator_);
  agree_on_tables(tables, options, *communicator_);
  const RankOf where = communicator_->rank_of();
  const Roles roles = roles_of(options.servers, where);
  // All ranks plan with what the first one sees.
  const std::vector<std::string> bytes =
      gather_texts(std::to_string(memory_of_machine()), *communicator_, communicator_->device());
  const BoardPlan lines = plan_board(roles, options);
  const int64_t line = line_of(roles, lines, where.rank);
  const bool works = line < lines.workers;
  memory_ =
      ServerMemory::share(ServerPlan(std::move(tables), options, lines, std::stoll(bytes.front())),
                          works ? std::optional(line) : std::nullopt, *communicator_);
  ClockBoard::Request request;
  request.memory = memory_->board();
  request.keeps_memory = memory_;
  request.options = options;
  request.plan = lines;
  request.line = line;
  request.where = where;
  if (where.world > 1) request.group = &communicator_->host()->group();
  board_ = std::make_shared<ClockBoard>(std::move(request));
  if (board_->worker() == 0) write_first_values();
  communicator_->barrier("first values of tables").wait();
  board_->watch_peers();
  make_tables(options.mode == Mode::kBsp && options.backup == 0 && works);
}

ParameterServer::ParameterServer(std::shared_ptr<const ServerMemory> memory,
                                 std::shared_ptr<ClockBoard> board)
    : memory_(std::move(memory)), board_(std::move(board)) {
  make_tables(/*moves_no_byte=*/false);
}

void ParameterServer::describe_held() {
  board_->describe_held_by([this](int64_t worker) {
    std::string held;
    for (const auto& table : tables_)
      if (held.empty()) held = table->steps().held_by(worker);
    return held;
  });
}

// Makes the tables as this rank sees them.
void ParameterServer::make_tables(bool moves_no_byte) {
  const at::NoGradGuard no_grad;
  desk_ = std::make_shared<WorkerDesk>(board_);
  meeting_ = std::make_unique<WorkerMeeting>(board_);
  const ServerPlan& plan = memory_->plan();
  for (size_t i = 0; i < plan.specs.size(); ++i) {
    const TableSpec& spec = *plan.specs[i];
    TableSteps::Parts steps{plan.specs[i], board_, memory_->table(i), memory_};
    if (spec.rows) {
      tables_.push_back(std::make_shared<SparseTable>(SparseTable::Parts{
          std::move(steps), plan.tables[i], memory_->values(i), plan.rows[i], memory_, desk_}));
    } else {
      const bool binds = moves_no_byte && spec.is_module && lies_on_cpu(spec);
      tables_.push_back(std::make_shared<DenseTable>(
          DenseTable::Parts{std::move(steps), plan.tables[i], make_store(i), desk_, binds}));
    }
  }
  describe_held();
}

std::shared_ptr<HostStore> ParameterServer::make_store(size_t table) const {
  const ServerPlan& plan = memory_->plan();
  return HostStore::make(memory_->values(table), infos_of(*plan.specs[table]), {0, plan.ranks()});
}

void ParameterServer::write_first_values() const {
  const at::NoGradGuard no_grad;
  for (size_t table = 0; table < memory_->plan().specs.size(); ++table) {
    const TableSpec& spec = *memory_->plan().specs[table];
    if (spec.rows) continue;
    const std::shared_ptr<HostStore> store = make_store(table);
    for (size_t i = 0; i < spec.tensors.size(); ++i)
      store->whole(static_cast<int64_t>(i)).copy_(spec.tensors[i]);
  }
}

ParameterServer::~ParameterServer() {
  close(std::uncaught_exceptions() > 0 ? "an exception, which its output shows" : "");
}

std::optional<int64_t> ParameterServer::worker() const { return board_->worker(); }

int64_t ParameterServer::workers() const { return board_->workers(); }

int64_t ParameterServer::clock() {
  TRIREME_TRACE("ps.clock");
  desk_->check_worker("clock");
  for (const auto& table : tables_) table->before_clock();
  desk_->move_clock();
  for (const auto& table : tables_) table->after_clock();
  return static_cast<int64_t>(board_->clock());
}

std::vector<int64_t> ParameterServer::clocks() const {
  desk_->check_open("clocks");
  std::vector<int64_t> clocks;
  for (int64_t worker = 0; worker < board_->workers(); ++worker)
    clocks.push_back(static_cast<int64_t>(board_->clock_of(worker)));
  return clocks;
}

Stats ParameterServer::stats() const {
  desk_->check_open("stats");
  Stats stats;
  stats.clocks = clocks();
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    const LineState state = board_->state_of(worker);
    if (state == LineState::kLeft) stats.left.push_back(worker);
    if (has_broken_off(state)) stats.lost.push_back(worker);
    if (state != LineState::kHere) continue;
    const auto clock = stats.clocks[static_cast<size_t>(worker)];
    if (!stats.slowest || clock < stats.clocks[static_cast<size_t>(*stats.slowest)])
      stats.slowest = worker;
  }
  stats.waited = board_->waited();
  const WorkerCounts& counts = std::as_const(*desk_).counts();
  stats.pulls = counts.pulls;
  stats.pushes = counts.pushes;
  stats.dropped = counts.dropped;
  stats.bytes_pulled = counts.bytes_pulled;
  stats.bytes_pushed = counts.bytes_pushed;
  for (const auto& table : tables_) {
    stats.torn += table->steps().count_torn(stats.torn_blocks);
    stats.memory_bytes += table->memory_bytes();
    stats.rows += table->count_rows();
  }
  return stats;
}

void ParameterServer::serve() {
  TRIREME_TRACE("ps.serve");
  desk_->check_open("serve");
  TORCH_CHECK(!board_->worker(),
              error_text(kPsArea, "serve: got a rank that works, expected one that serves",
                         board_->where(), "Name it in Options::servers."));
  Errand errand{[] { return std::string("serve"); }, "serve"};
  errand.has_deadline = false;  // workers train for as long as they like
  for (int64_t worker = 0; worker < board_->workers(); ++worker) {
    errand.worker = worker;
    board_->wait_gone(worker, errand);
  }
  board_->check_peers(errand);
}

// --- late workers --------------------------------------------------------------------------------

void ParameterServer::accept(const c10::intrusive_ptr<c10d::Store>& store) {
  desk_->check_open("accept");
  const std::vector<std::string> addresses = memory_->addresses();
  TORCH_CHECK(
      !addresses.empty(),
      error_text(kPsArea, "accept: got a host whose processes may not open each other's memory",
                 board_->where(), "Allow it (ptrace), or start with all workers."));
  put_text(store, kInvitation, to_text({memory_->plan(), addresses}));
}

std::unique_ptr<ParameterServer> ParameterServer::join(
    const c10::intrusive_ptr<c10d::Store>& store) {
  const Invitation invitation = invitation_of(get_text(store, kInvitation));
  const auto memory = ServerMemory::open(invitation.plan, invitation.addresses);
  ClockBoard::Request request;
  request.memory = memory->board();
  request.keeps_memory = memory;
  request.options = memory->plan().options;
  request.plan = memory->plan().board;
  const auto board = ClockBoard::join(std::move(request), [&](int64_t worker) {
    memory->reserve_worker(worker, {worker, worker + 1});
  });
  return std::unique_ptr<ParameterServer>(new ParameterServer(memory, board));
}

void ParameterServer::refuse_without_group(std::string_view verb) const {
  TORCH_CHECK(
      communicator_ != nullptr,
      error_text(kPsArea,
                 c10::str(verb, ": got a worker that has joined, expected a rank of the group"),
                 board_->where(), "Call it before workers join, on all ranks."));
}

// --- saving --------------------------------------------------------------------------------------

void ParameterServer::save(const std::string& path) {
  TRIREME_TRACE("ps.save");
  desk_->check_worker("save");
  const Errand errand{[this] { return c10::str("save at clock ", board_->clock()); }, "save"};
  WorkerMeeting::Plan plan{errand};
  plan.at_one_clock = board_->options().mode == Mode::kBsp && board_->options().backup == 0;
  plan.prepare = [this] {
    for (const auto& table : tables_) {
      table->prepare_meeting();
      table->bring_to_closed();
    }
  };
  plan.work = [&] {
    check_buffers_known();
    for (const auto& table : tables_) table->settle_learning_rate();
    save_tables(path, tables_);
  };
  meeting_->hold(plan);
}

void ParameterServer::load(const std::string& path) {
  TRIREME_TRACE("ps.load");
  desk_->check_open("load");
  refuse_without_group("load");
  const bool works = board_->worker().has_value();
  if (works) desk_->check_worker("load");
  const CheckpointRanks ranks{communicator_, communicator_->device()};
  together(ranks, [&] {
    for (int64_t worker = 0; worker < workers(); ++worker)
      TORCH_CHECK_VALUE(!board_->has_joined(worker) || board_->is_gone(worker),
                        error_text(kPsArea,
                                   c10::str("load: got ", board_->name_of(worker),
                                            ", expected ranks of the group alone"),
                                   board_->where(), "Load before workers join."));
    if (!works) return;
    for (const auto& table : tables_) table->drop_pushes();
  });
  together(ranks, [&] {
    for (int64_t worker = 0; worker < workers(); ++worker)
      TORCH_CHECK_VALUE(board_->clock_of(worker) == board_->clock_of(0),
                        error_text(kPsArea,
                                   c10::str("load: got ", board_->name_of(worker), " at clock ",
                                            board_->clock_of(worker), ", expected clock ",
                                            board_->clock_of(0), ", where worker 0 is"),
                                   board_->where(), "Load after as many clocks on all workers."));
    if (!works) return;
    for (const auto& table : tables_) table->bring_to_closed();
  });
  const at::NoGradGuard no_grad;
  together(ranks, [&] {
    if (board_->worker() != 0) return;
    // Says that there is one for all workers, which is read then.
    for (const auto& table : tables_) table->settle_learning_rate();
    load_tables(path, tables_, board_->where());
  });
  together(ranks, [&] {
    if (!works) return;
    if (board_->worker() != 0) load_buffers(path, tables_);
    for (const auto& table : tables_) table->note_loaded();
  });
}

// A worker that has joined knows no module.
void ParameterServer::check_buffers_known() const {
  for (const auto& table : tables_)
    TORCH_CHECK_VALUE(!table->spec().has_module_elsewhere,
                      error_text(kPsArea,
                                 c10::str("save: got table '", table->name(),
                                          "' made of a module, which no worker that is left has, "
                                          "expected a rank of the group"),
                                 board_->where(), "Save while such a rank is there."));
}

void ParameterServer::release_modules() noexcept {
  for (const auto& table : tables_) {
    try {
      table->release_module();
    } catch (const std::exception& error) {
      TORCH_WARN(error_text(
          kPsArea, "while table '" + table->name() + "' let go of its module: " + error.what(),
          board_->where(), "Its values may be those of half a step."));
    }
  }
}

void ParameterServer::leave() {
  desk_->check_open("leave");
  if (!board_->worker() || desk_->has_left()) return;
  release_modules();
  desk_->note_left();
  board_->leave(LineState::kLeft, {});
}

void ParameterServer::close(std::string_view error) noexcept {
  if (board_ == nullptr || desk_ == nullptr || desk_->is_closed() || desk_->is_forked()) return;
  const bool works = board_->worker() && !desk_->has_left();
  if (works) release_modules();
  desk_->note_closed();
  board_->describe_held_by({});  // a table may outlive this
  if (works) board_->leave(error.empty() ? LineState::kLeft : LineState::kFailed, error);
}

std::vector<std::string> ParameterServer::table_names() const {
  std::vector<std::string> names;
  for (const auto& table : tables_) names.push_back(table->name());
  return names;
}

bool ParameterServer::is_sparse(std::string_view name) const {
  return find(name, "is_sparse")->spec().rows.has_value();
}

std::shared_ptr<Table> ParameterServer::find(std::string_view name, std::string_view verb) const {
  desk_->check_open(verb);
  std::string known;
  for (const auto& table : tables_) {
    if (table->name() == name) return table;
    known += (known.empty() ? "'" : ", '") + table->name() + "'";
  }
  C10_THROW_ERROR(IndexError,
                  error_text(kPsArea, c10::str("got table '", name, "', expected one of ", known),
                             board_->where(), "Ask for a table of the server."));
}

void ParameterServer::refuse_kind(std::string_view name, const char* got, const char* expected) {
  C10_THROW_ERROR(IndexError, error_text(kPsArea,
                                         c10::str("got the ", got, " table '", name,
                                                  "', expected a ", expected, " one"),
                                         board_->where(), "Ask for it by its own kind."));
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
