#include <trireme/strategies/parameter_server/server_setup.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/common/resolved.h>
#include <trireme/memory/host_store.h>
#include <trireme/shm/host_group.h>
#include <trireme/strategies/parameter_server/table_agreement.h>
#include <trireme/strategies/parameter_server/worker_session.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <sstream>
#include <unistd.h>
#include <utility>

namespace trireme::ps {
namespace {

// The most workers that may join a server.
constexpr int64_t kMostJoined = 64;

BoardPlan plan_board(const HostRanks& ranks, const Options& options) {
  BoardPlan plan;
  plan.workers = static_cast<int64_t>(ranks.roles.workers.size());
  plan.has_hosts = ranks.count() > 1;
  plan.most_workers = plan.workers + (plan.has_hosts ? 0 : kMostJoined);
  if (options.backup > 0) plan.most_workers = std::min(plan.most_workers, kMostWithBackup);
  plan.servers = static_cast<int64_t>(ranks.servers_on(ranks.own).size());
  return plan;
}

// Returns the line of a rank: workers come first, then workers that may join, then servers of this
// host.
int64_t line_of(const HostRanks& ranks, const BoardPlan& plan, int64_t rank) {
  const std::vector<int64_t>& workers = ranks.roles.workers;
  const auto worker = std::find(workers.begin(), workers.end(), rank);
  if (worker != workers.end()) return worker - workers.begin();
  const std::vector<int64_t> servers = ranks.servers_on(ranks.own);
  return plan.most_workers + (std::find(servers.begin(), servers.end(), rank) - servers.begin());
}

// The number of servers made so far. All ranks take the same number for a server, the highest of
// any rank's, which none of them has used.
std::atomic<int64_t> servers_made{0};

}  // namespace

// A rank's contribution to the exchange before ranks plan their memory.
struct ServerSetup::Introduction {
  int64_t machine_bytes = 0;
  int64_t pid = 0;
  int64_t servers = 0;  // made so far by this rank
};

std::vector<ServerSetup::Introduction> ServerSetup::introduce(Communicator& communicator) {
  const std::string own = c10::str(memory_of_machine(), " ", ::getpid(), " ", servers_made.load());
  std::vector<Introduction> all;
  for (const std::string& text : gather_texts(own, communicator, communicator.device())) {
    Introduction& introduction = all.emplace_back();
    std::istringstream(text) >> introduction.machine_bytes >> introduction.pid >>
        introduction.servers;
  }
  return all;
}

// Returns a group for messages alone, so that a rank that dies ends nothing else.
std::shared_ptr<Communicator> ServerSetup::group_for_messages(
    Communicator& communicator, const std::vector<Introduction>& all) {
  const auto most = std::max_element(all.begin(), all.end(),
                                     [](const Introduction& one, const Introduction& other) {
                                       return one.servers < other.servers;
                                     });
  servers_made = most->servers + 1;
  std::vector<int> ranks(static_cast<size_t>(communicator.world()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return communicator.split(ranks, c10::str("parameter server ", most->servers));
}

ServerSetup::ServerSetup(std::shared_ptr<Communicator> communicator, std::vector<TableSpec> tables,
                         const Options& options)
    : communicator_(std::move(communicator)) {
  agree_on_tables(tables, options, *communicator_);
  ranks_ = host_ranks_of(*communicator_, options);
  const std::vector<Introduction> all = introduce(*communicator_);
  const RankOf where = communicator_->rank_of();
  const BoardPlan lines = plan_board(ranks_, options);
  const int64_t line = line_of(ranks_, lines, where.rank);
  const bool works = line < lines.workers;
  std::vector<int64_t> written = ranks_.served_by(where.rank);
  if (works) written.push_back(line);
  memory_ = ServerMemory::share(plan_of(tables, options, lines, all.front().machine_bytes), written,
                                *communicator_);
  ProgressTable::Request request;
  request.memory = memory_->board();
  request.keeps_memory = memory_;
  request.options = options;
  request.plan = lines;
  request.line = line;
  request.where = where;
  if (where.world > 1) request.group = &communicator_->host()->group();
  const auto board = std::make_shared<ProgressTable>(std::move(request));
  if (ranks_.count() > 1) reach_other_hosts(board, all);
  write_first_values(tables);
  communicator_->barrier("first values of tables").wait();
  board->watch_peers();
  if (shares_ != nullptr) shares_->make_tables();
  const bool moves_no_byte =
      options.mode == Mode::kBsp && options.backup == 0 && works && ranks_.count() == 1;
  make_tables(board, moves_no_byte, std::move(tables));
}

ServerSetup::ServerSetup(const Invitation& invitation)
    : memory_(ServerMemory::open(invitation.plan, invitation.addresses)) {
  ranks_.hosts = {{}};
  ProgressTable::Request request;
  request.memory = memory_->board();
  request.keeps_memory = memory_;
  request.options = memory_->plan().options;
  request.plan = memory_->plan().board;
  const auto board = ProgressTable::join(std::move(request), [this](int64_t worker) {
    memory_->reserve_worker(worker, {worker, worker + 1});
  });
  make_tables(board, /*moves_no_byte=*/false, {});
}

ServerSetup::~ServerSetup() {
  if (box_ == nullptr || here_.session == nullptr || !here_.session->is_forked()) return;
  // In a forked child the threads are missing, so nothing can be joined: this leaks.
  static_cast<void>(new std::shared_ptr<MessageBox>(box_));
  static_cast<void>(shares_.release());
}

ServerPlan ServerSetup::plan_of(const std::vector<TableSpec>& tables, const Options& options,
                                const BoardPlan& lines, int64_t machine_bytes) const {
  std::vector<TableLayout> layouts;
  std::vector<TableSpec> shares;
  for (const TableSpec& table : tables) {
    layouts.push_back(layout_of(table, ranks_.count(), ranks_.own));
    shares.push_back(share_of(table, layouts.back()));
  }
  return {std::move(shares), std::move(layouts), options, lines, machine_bytes};
}

// Makes this rank's link to other hosts: ShardClient on a worker, a ShardServer on a serving rank.
void ServerSetup::reach_other_hosts(const std::shared_ptr<ProgressTable>& board,
                                    const std::vector<Introduction>& all) {
  const RankOf where = board->where();
  const std::shared_ptr<Communicator> messages = group_for_messages(*communicator_, all);
  if (messages == nullptr)
    C10_THROW_ERROR(NotImplementedError, error_text(kPsArea, "got an engine that makes no groups",
                                                    where, "Use backend 'trireme'."));
  box_ = std::shared_ptr<MessageBox>(new MessageBox(*messages),
                                     [messages](MessageBox* box) { delete box; });
  const auto limit = board->options().timeout.value_or(communicator_->host()->group().timeout());
  if (board->worker()) {
    ShardClient::Parts parts{box_, board, ranks_.own, {}, limit};
    for (int64_t host = 0; host < ranks_.count(); ++host)
      parts.servers.push_back(ranks_.server_for(*board->worker(), host));
    remote_ = std::make_shared<ShardClient>(std::move(parts));
    return;
  }
  std::vector<ShardServer::Worker> workers;
  for (const int64_t worker : ranks_.served_by(where.rank)) {
    const int64_t rank = ranks_.roles.workers[static_cast<size_t>(worker)];
    workers.push_back({worker, rank, all[static_cast<size_t>(rank)].pid});
  }
  Options options = board->options();
  options.timeout = limit;
  shares_ = std::make_unique<ShardServer>(ShardServer::Parts{box_, memory_, where, limit}, options,
                                          workers);
}

// Makes this rank's view of the tables.
void ServerSetup::make_tables(const std::shared_ptr<ProgressTable>& board, bool moves_no_byte,
                              std::vector<TableSpec> whole) {
  HostTablesRequest request;
  request.memory = memory_;
  request.board = board;
  request.moves_no_byte = moves_no_byte;
  request.remote = remote_;
  if (remote_ != nullptr)
    for (TableSpec& table : whole)
      request.whole.push_back(std::make_shared<const TableSpec>(std::move(table)));
  here_ = make_host_tables(request);
}

// Writes worker 0's values into the memory of each host.
void ServerSetup::write_first_values(const std::vector<TableSpec>& tables) const {
  const at::NoGradGuard no_grad;
  const int64_t source = ranks_.roles.workers.front();
  const bool writes = ranks_.count() == 1 ? communicator_->rank() == source
                                          : ranks_.is_first_on_host(communicator_->rank());
  for (size_t table = 0; table < tables.size(); ++table) {
    if (tables[table].rows) continue;
    const TableLayout& layout = memory_->plan().layouts[table];
    std::shared_ptr<HostStore> store = writes ? store_of(*memory_, table) : nullptr;
    int64_t next = 0;
    for (size_t i = 0; i < tables[table].tensors.size(); ++i) {
      const at::Tensor values = first_values(tables[table].tensors[i], source);
      for (const TableShare& share : layout.shares)
        if (share.tensor == static_cast<int64_t>(i) && share.host == layout.own_host && writes)
          store->whole(next++).copy_(rows_of(values, share));
    }
  }
}

// Returns worker 0's tensor on all ranks (collective); on one host a rank's own.
at::Tensor ServerSetup::first_values(const at::Tensor& own, int64_t source) const {
  if (ranks_.count() == 1) return own;
  const at::Tensor values = resolved(own.detach().to(at::kCPU)).contiguous().clone();
  communicator_->broadcast({values}, source, "first values of tables").wait();
  return values;
}

// Returns the tables by which this rank loads the share of its host; null if another rank loads it.
const WorkerTables* ServerSetup::loader() const {
  const std::vector<int64_t>& workers = ranks_.roles.workers;
  for (const int64_t rank : workers)
    if (ranks_.host_of(rank) == ranks_.own) return rank == communicator_->rank() ? &here_ : nullptr;
  return shares_ != nullptr && ranks_.servers_on(ranks_.own).front() == communicator_->rank()
             ? shares_->first_tables()
             : nullptr;
}

}  // namespace trireme::ps
