#include <trireme/strategies/parameter_server/server_memory.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/common/text_lines.h>
#include <trireme/memory/host_store.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/host_group.h>
#include <trireme/strategies/parameter_server/hosts/table_shares.h>
#include <trireme/strategies/parameter_server/sparse_steps.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <unistd.h>
#include <utility>

namespace trireme::ps {
namespace {

RowPlan plan_rows(const TableSpec& table, const ServerPlan& plan) {
  RowPlanRequest request;
  request.dim = table.rows->dim;
  request.dtype = table.rows->dtype;
  request.states = count_states(table.optimizer);
  request.state_numel = is_rowwise(table.optimizer) ? 1 : table.rows->dim;
  request.rows = table.rows->rows;
  request.workers = plan.board.most_workers;
  request.deposits = plan.options.mode == Mode::kBsp;
  request.memory_bytes = plan.machine_bytes;
  return make_row_plan(request);
}

void check(const std::vector<std::string>& texts, RankOf where) {
  const auto complaint = first_complaint(texts);
  if (!complaint) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea,
                 c10::str("got no memory for ", complaint->text, ", says rank ", complaint->rank),
                 where, "Make tables smaller, give rows=, or free memory."));
}

std::vector<TableLayout> layouts_of(const std::vector<TableSpec>& tables) {
  std::vector<TableLayout> layouts;
  for (const TableSpec& table : tables) layouts.push_back(layout_of(table, 1, 0));
  return layouts;
}

}  // namespace

int64_t memory_of_machine() {
  return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(::sysconf(_SC_PAGE_SIZE));
}

ServerPlan::ServerPlan(std::vector<TableSpec> all, const Options& options, BoardPlan lines,
                       int64_t machine_bytes)
    : ServerPlan(all, layouts_of(all), options, lines, machine_bytes) {}

ServerPlan::ServerPlan(std::vector<TableSpec> all, std::vector<TableLayout> layouts,
                       const Options& options, BoardPlan lines, int64_t machine_bytes)
    : options(options),
      board(lines),
      machine_bytes(machine_bytes),
      layouts(std::move(layouts)),
      bytes{board.bytes()} {
  for (TableSpec& table : all) {
    if (table.rows) {
      tables.push_back(make_sparse_table_plan(SparseSteps::kShares, board.most_workers));
      rows.push_back(plan_rows(table, *this));
      bytes.push_back(rows.back().bytes);
    } else {
      const std::vector<ParameterInfo> infos = infos_of(table);
      tables.push_back(make_table_plan(
          {infos, count_states(table.optimizer), board.most_workers, options.mode == Mode::kBsp}));
      rows.emplace_back();
      bytes.push_back(HostStore::bytes_for(infos, ranks()));
    }
    bytes.front() += tables.back().bytes;
    specs.push_back(std::make_shared<const TableSpec>(std::move(table)));
  }
}

std::string ServerMemory::name_of(size_t segment) const {
  if (segment == 0) return "clocks, states and deposits of tables";
  const TableSpec& spec = *plan_.specs[segment - 1];
  return (spec.rows ? "the rows of table '" : "table '") + spec.name + "'";
}

std::byte* ServerMemory::table(size_t table) const {
  std::byte* place = board() + plan_.board.bytes();
  for (size_t i = 0; i < table; ++i) place += plan_.tables[i].bytes;
  return place;
}

void ServerMemory::take(shm::Segment segment) {
  auto shared = std::make_shared<shm::Segment>(std::move(segment));
  std::shared_ptr<const void> keeps = shared->private_in_children();
  segments_.push_back({std::move(shared), std::move(keeps)});
}

// --- making and opening; each returns nothing, or what is in the way -----------------------------

std::string ServerMemory::make_all(shm::SegmentKind kind) {
  for (size_t i = 0; i < plan_.bytes.size(); ++i) {
    try {
      take(shm::Segment::create_growing(kind, plan_.bytes[i]));
    } catch (const shm::Fault& fault) {
      return c10::str(name_of(i), ": ", fault.what());
    }
  }
  return {};
}

std::string ServerMemory::open_all(const std::vector<std::string>& addresses) {
  for (size_t i = 0; i < plan_.bytes.size(); ++i) {
    const auto address =
        i < addresses.size() ? shm::SegmentAddress::parse(addresses[i]) : std::nullopt;
    if (!address || address->bytes != plan_.bytes[i])
      return c10::str(name_of(i), ": it has another size here");
    std::string why_not;
    shm::Segment segment = shm::Segment::open(*address, why_not, /*keeps_file=*/true);
    if (!segment) return c10::str(name_of(i), ": ", why_not);
    take(std::move(segment));
  }
  return {};
}

// Reserves one of the equal parts of the shared memory, so that its pages lie near this rank, and
// on the first rank the board, headers and lines that all ranks read.
std::string ServerMemory::reserve_part(int64_t part, int64_t parts, bool is_first) const {
  std::string why_not;
  const auto reserve = [&](size_t segment, int64_t begin, int64_t end) {
    if (!why_not.empty() || begin == end) return;
    std::string reason;
    if (!segments_[segment].segment->grow(begin, end, reason))
      why_not = c10::str(name_of(segment), ": ", reason);
  };
  const auto reserve_share = [&](size_t segment, int64_t begin, int64_t end) {
    const int64_t bytes = end - begin;
    reserve(segment, begin + bytes * part / parts, begin + bytes * (part + 1) / parts);
  };
  if (is_first) reserve(0, 0, plan_.board.bytes());
  for (size_t i = 0; i < plan_.tables.size(); ++i) {
    const TablePlan& table = plan_.tables[i];
    const auto begin = this->table(i) - board();
    if (is_first) reserve(0, begin, begin + table.marks_at);
    reserve_share(0, begin + table.states_begin, begin + table.states_end);
    if (plan_.specs[i]->rows) {
      if (is_first) reserve(i + 1, 0, plan_.rows[i].first_bytes());
    } else {
      reserve_share(i + 1, 0, plan_.bytes[i + 1]);
    }
  }
  return why_not;
}

std::string ServerMemory::try_reserve_worker(int64_t worker) const {
  std::string why_not;
  for (size_t i = 0; i < plan_.tables.size(); ++i) {
    const TablePlan& table = plan_.tables[i];
    const auto begin = this->table(i) - board();
    const int64_t marks = begin + table.marks_at + worker * table.mark_bytes;
    const int64_t deposits = begin + table.deposits_at + worker * 2 * table.half_bytes;
    const shm::Segment& segment = *segments_.front().segment;
    if (!segment.grow(marks, marks + table.mark_bytes, why_not) ||
        (table.half_bytes > 0 && !segment.grow(deposits, deposits + 2 * table.half_bytes, why_not)))
      return c10::str("what worker ", worker, " pushes into table '", plan_.specs[i]->name,
                      "': ", why_not);
  }
  return {};
}

void ServerMemory::reserve_worker(int64_t worker, RankOf where) const {
  const std::string why_not = try_reserve_worker(worker);
  if (why_not.empty()) return;
  C10_THROW_ERROR(DistBackendError, error_text(kPsArea, "got no memory for " + why_not, where,
                                               "Free memory, or use fewer workers."));
}

std::shared_ptr<const ServerMemory> ServerMemory::share(ServerPlan plan,
                                                        const std::vector<int64_t>& workers,
                                                        Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const auto gather = [&](const std::string& own) {
    std::vector<std::string> texts = gather_texts(own, communicator, communicator.device());
    check(texts, where);
    return texts;
  };
  shm::HostGroup* group = where.world == 1 ? nullptr : &communicator.host()->group();
  const int64_t part = group == nullptr ? 0 : group->rank();
  const bool is_first = part == 0;
  const int64_t first = group == nullptr ? 0 : group->members().front();
  std::shared_ptr<ServerMemory> memory(new ServerMemory(std::move(plan)));
  std::string own;
  if (is_first) {
    own = as_complaint(
        memory->make_all(group == nullptr ? shm::SegmentKind::kAnonymous : group->segment_kind()));
    if (own.empty()) {
      std::vector<std::string> addresses;
      for (const Shared& shared : memory->segments_)
        addresses.push_back(shared.segment->address().to_string());
      own = c10::Join("\n", addresses);
    }
  }
  const std::string addresses = gather(own)[static_cast<size_t>(first)];
  std::string why_not = is_first ? std::string() : memory->open_all(lines_of(addresses));
  for (const int64_t worker : workers)
    if (why_not.empty()) why_not = memory->try_reserve_worker(worker);
  if (why_not.empty())
    why_not = memory->reserve_part(part, group == nullptr ? 1 : group->world(), is_first);
  gather(as_complaint(why_not));
  for (const Shared& shared : memory->segments_) shared.segment->unlink_name();
  return memory;
}

std::shared_ptr<const ServerMemory> ServerMemory::open(ServerPlan plan,
                                                       const std::vector<std::string>& addresses) {
  std::shared_ptr<ServerMemory> memory(new ServerMemory(std::move(plan)));
  const std::string why_not = memory->open_all(addresses);
  if (why_not.empty()) return memory;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, "join: cannot open the memory of " + why_not, {},
                 "Join on the same host, as the same user, while the process lives that called "
                 "accept()."));
}

std::vector<std::string> ServerMemory::addresses() const {
  std::vector<std::string> addresses;
  for (const Shared& shared : segments_) {
    const auto here = shared.segment->address_here();
    if (!here) return {};
    addresses.push_back(here->to_string());
  }
  return addresses;
}

}  // namespace trireme::ps
