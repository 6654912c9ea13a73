#include <trireme/strategies/parameter_server/parameter_server.h>

#include <trireme/comm/host.h>
#include <trireme/common/forks.h>
#include <trireme/common/trace.h>
#include <trireme/memory/host_store.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/shared_rows.h>
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

// Is memory of the host, which forked children copy when they write.
struct ParameterServer::TableSegment {
  std::shared_ptr<const shm::Segment> segment;
  std::shared_ptr<const PrivateInChildren> private_in_children;  // goes first
};

namespace {

std::shared_ptr<const shm::Segment> share(Communicator& communicator, int64_t bytes,
                                          const std::string& label) {
  SharedMemory memory;
  if (communicator.world() == 1) {
    try {
      memory.segment = std::make_shared<const shm::Segment>(
          shm::Segment::create(shm::SegmentKind::kAnonymous, bytes));
    } catch (const shm::Fault& fault) {
      memory.why_not = fault.what();
    }
  } else {
    memory = communicator.host()->share_host_memory(bytes, label).memory;
  }
  if (memory.segment != nullptr) return memory.segment;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, c10::str("got no ", bytes, " bytes for ", label, ": ", memory.why_not),
                 communicator.rank_of(), "Make tables smaller, or free memory."));
}

void check_host(Communicator& communicator) {
  if (communicator.world() == 1) return;
  Host* host = communicator.host();
  TORCH_CHECK_VALUE(
      host != nullptr && host->group().world() == communicator.world(),
      error_text(kPsArea, "got a group whose ranks do not share the memory of one host",
                 communicator.rank_of(),
                 "Use backend 'trireme' on one host; there are no servers between hosts yet."));
}

std::vector<ParameterInfo> infos_of(const TableSpec& table) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    ParameterInfo info;
    info.name = table.names[i];
    info.sizes = table.tensors[i].sizes().vec();
    info.numel = table.tensors[i].numel();
    info.dtype = table.tensors[i].scalar_type();
    infos.push_back(std::move(info));
  }
  return infos;
}

std::vector<TablePlan> plan_tables(const std::vector<TableSpec>& tables, const Options& options,
                                   RankOf where) {
  const auto workers = static_cast<int64_t>(roles_of(options.servers, where).workers.size());
  const bool deposits = options.mode == Mode::kBsp;
  std::vector<TablePlan> plans;
  for (const TableSpec& table : tables)
    plans.push_back(table.rows ? make_sparse_table_plan(SparseSteps::kShares, workers)
                               : make_table_plan({infos_of(table), count_states(table.optimizer),
                                                  workers, deposits}));
  return plans;
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
  const std::vector<TablePlan> plans = plan_tables(tables, options, communicator_->rank_of());
  const std::shared_ptr<const TableSegment> memory = make_board(plans, options);
  const at::NoGradGuard no_grad;
  std::vector<std::shared_ptr<HostStore>> stores;
  std::vector<SharedRows> rows;
  for (const TableSpec& table : tables) {
    stores.push_back(table.rows ? nullptr : make_store(table));
    rows.push_back(table.rows ? share_rows(table, board_->workers(), options, *communicator_)
                              : SharedRows());
  }
  communicator_->barrier("first values of tables").wait();
  board_->watch_peers();
  std::byte* place = memory->segment->data() + ClockBoard::bytes_for(board_->where().world);
  const bool moves_no_byte =
      options.mode == Mode::kBsp && options.backup == 0 && board_->worker().has_value();
  for (size_t i = 0; i < tables.size(); ++i) {
    const bool binds = moves_no_byte && tables[i].is_module && lies_on_cpu(tables[i]);
    TableSteps::Parts steps;
    steps.spec = std::make_shared<const TableSpec>(std::move(tables[i]));
    steps.board = board_;
    steps.memory = std::exchange(place, place + plans[i].bytes);
    steps.keeps_memory = memory;
    if (stores[i] != nullptr) {
      tables_.push_back(std::make_shared<DenseTable>(
          DenseTable::Parts{std::move(steps), plans[i], stores[i], desk_, binds}));
    } else {
      tables_.push_back(std::make_shared<SparseTable>(SparseTable::Parts{
          std::move(steps), plans[i], rows[i].segment, rows[i].plan, rows[i].keeps, desk_}));
    }
  }
}

// Makes the memory of a dense table's values; worker 0 writes the first ones.
std::shared_ptr<HostStore> ParameterServer::make_store(const TableSpec& table) {
  const std::vector<ParameterInfo> infos = infos_of(table);
  const int64_t bytes = HostStore::bytes_for(infos, board_->where().world);
  const std::shared_ptr<HostStore> store = HostStore::make(
      share(*communicator_, bytes, "table '" + table.name + "'"), infos, board_->where());
  if (board_->worker() == 0)
    for (size_t i = 0; i < table.tensors.size(); ++i)
      store->whole(static_cast<int64_t>(i)).copy_(table.tensors[i]);
  return store;
}

// Makes the memory of clocks, and behind that of what belongs to tables but their values.
std::shared_ptr<const ParameterServer::TableSegment> ParameterServer::make_board(
    const std::vector<TablePlan>& plans, const Options& options) {
  ClockBoard::Request request;
  request.options = options;
  request.roles = roles_of(options.servers, communicator_->rank_of());
  request.where = communicator_->rank_of();
  if (communicator_->world() > 1) request.group = &communicator_->host()->group();
  int64_t bytes = ClockBoard::bytes_for(request.where.world);
  for (const TablePlan& plan : plans) bytes += plan.bytes;
  const auto memory = std::make_shared<TableSegment>();
  memory->segment = share(*communicator_, bytes, "clocks, states and deposits of tables");
  memory->private_in_children = memory->segment->private_in_children();
  request.memory = memory->segment->data();
  board_ = std::shared_ptr<ClockBoard>(new ClockBoard(std::move(request)),
                                       [memory](ClockBoard* board) { delete board; });
  board_->describe_held_by([this](int64_t worker) {
    std::string held;
    for (const auto& table : tables_)
      if (held.empty()) held = table->steps().held_by(worker);
    return held;
  });
  desk_ = std::make_shared<WorkerDesk>(board_);
  meeting_ = std::make_unique<WorkerMeeting>(board_);
  return memory;
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
    for (const auto& table : tables_) table->settle_learning_rate();
    save_tables(path, tables_);
  };
  meeting_->hold(plan);
}

void ParameterServer::load(const std::string& path) {
  TRIREME_TRACE("ps.load");
  desk_->check_open("load");
  const bool works = board_->worker().has_value();
  if (works) desk_->check_worker("load");
  const CheckpointRanks ranks{communicator_, communicator_->device()};
  together(ranks, [&] {
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

std::shared_ptr<Table> ParameterServer::find(std::string_view name, std::string_view verb) {
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
