#include <trireme/strategies/parameter_server/shared_rows.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/host_group.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace trireme::ps {
namespace {

// Begins the text of a rank that cannot have the memory.
constexpr char kWhyNot = '!';

int64_t machine_bytes() {
  return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(::sysconf(_SC_PAGE_SIZE));
}

RowPlan plan_rows(const TableSpec& table, int64_t workers, const Options& options,
                  int64_t memory_bytes) {
  RowPlanRequest request;
  request.dim = table.rows->dim;
  request.dtype = table.rows->dtype;
  request.states = count_states(table.optimizer);
  request.state_numel = is_rowwise(table.optimizer) ? 1 : table.rows->dim;
  request.rows = table.rows->rows;
  request.workers = workers;
  request.deposits = options.mode == Mode::kBsp;
  request.memory_bytes = memory_bytes;
  return make_row_plan(request);
}

// Returns where it lies, or a complaint.
std::string make_segment(const RowPlan& plan, shm::SegmentKind kind, shm::Segment& segment) {
  try {
    segment = shm::Segment::create_growing(kind, plan.bytes);
  } catch (const shm::Fault& fault) {
    return kWhyNot + std::string(fault.what());
  }
  std::string why_not;
  if (!segment.grow(0, plan.first_bytes(), why_not)) return kWhyNot + why_not;
  return segment.address().to_string();
}

// Returns nothing, or a complaint.
std::string open_segment(const std::string& address, shm::Segment& segment) {
  const std::optional<shm::SegmentAddress> found = shm::SegmentAddress::parse(address);
  if (!found) return {};  // it complains
  std::string why_not;
  segment = shm::Segment::open(*found, why_not, /*keeps_file=*/true);
  return segment ? std::string() : kWhyNot + why_not;
}

void check(const std::vector<std::string>& texts, const TableSpec& table, RankOf where) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty() || texts[rank].front() != kWhyNot) continue;
    C10_THROW_ERROR(DistBackendError,
                    error_text(kPsArea,
                               c10::str("got no memory for the rows of table '", table.name,
                                        "': ", texts[rank].substr(1), ", says rank ", rank),
                               where, "Give the table rows=, or raise the limit of addresses."));
  }
}

}  // namespace

SharedRows share_rows(const TableSpec& table, int64_t workers, const Options& options,
                      Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  SharedRows rows;
  // All ranks plan with what the first one sees.
  const std::vector<std::string> bytes =
      gather_texts(std::to_string(machine_bytes()), communicator, communicator.device());
  rows.plan = plan_rows(table, workers, options, std::stoll(bytes[0]));
  shm::Segment segment;
  const bool is_alone = where.world == 1;
  const auto kind =
      is_alone ? shm::SegmentKind::kAnonymous : communicator.host()->group().segment_kind();
  const std::string made = where.rank == 0 ? make_segment(rows.plan, kind, segment) : std::string();
  const std::vector<std::string> addresses =
      gather_texts(made, communicator, communicator.device());
  check(addresses, table, where);
  const std::string opened = where.rank == 0 ? std::string() : open_segment(addresses[0], segment);
  check(gather_texts(opened, communicator, communicator.device()), table, where);
  segment.unlink_name();
  rows.keeps = segment.private_in_children();
  rows.segment = std::make_shared<const shm::Segment>(std::move(segment));
  return rows;
}

}  // namespace trireme::ps
