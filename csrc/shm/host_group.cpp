#include <trireme/shm/host_group.h>

#include <trireme/common/duration.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <unistd.h>
#include <utility>

namespace trireme::shm {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kRingBytes = 4 * kMiB;      // more than the caches that a core has to itself
constexpr int64_t kRingsOfAHost = 15 * kMiB;  // all of them, of up to eight ranks
constexpr int64_t kSmallestRing = 512 * 1024;
constexpr std::string_view kFailed = "failed ";  // in place of an address

int64_t ring_bytes_for(int64_t world) {
  const int64_t share = kRingsOfAHost / world / (64 * 1024) * (64 * 1024);
  return std::clamp(share, kSmallestRing, kRingBytes);
}

}  // namespace

HostGroup::HostGroup(const HostGroupRequest& request)
    : where_(request.where),
      request_(request),
      ring_bytes_(ring_bytes_for(request.where.world)),
      memory_kills_(out_of_memory_kills()),
      group_timeout_(saturated(request.timeout)) {}

std::unique_ptr<HostGroup> HostGroup::join(Exchange& exchange, const HostGroupRequest& request) {
  std::unique_ptr<HostGroup> group(new HostGroup(request));
  group->meet(exchange, SegmentKind::kAnonymous);
  return group;
}

// Makes one round through the Exchange: this rank's address, the segments that it sees, the vote.
void HostGroup::meet(Exchange& exchange, SegmentKind kind) {
  const std::string round = kind == SegmentKind::kAnonymous ? "anonymous/" : "named/";
  const auto key = [&](const char* what, int64_t rank) {
    return round + what + std::to_string(rank);
  };
  segments_.clear();
  segments_.resize(static_cast<size_t>(where_.world));
  processes_.clear();
  processes_.resize(static_cast<size_t>(where_.world));
  std::string failed;
  Segment own;
  try {
    own = Segment::create(kind, static_cast<int64_t>(sizeof(RankBlock)));
    auto* block = new (own.data()) RankBlock;
    block->pid = ::getpid();
    block->rank = static_cast<int32_t>(where_.rank);
    block->world = static_cast<int32_t>(where_.world);
    exchange.put(key("address/", where_.rank),
                 own.address().to_string() + "\n" + pid_namespace() + "\n" + request_.partition);
  } catch (const Fault& fault) {
    failed = fault.what();
    const bool fatal = fault.kind() == FaultKind::kMemory;
    exchange.put(key("address/", where_.rank), std::string(kFailed) + (fatal ? "1" : "0") + failed);
  }
  segments_[static_cast<size_t>(where_.rank)] = std::move(own);

  std::string row;
  const bool refused = look_for_peers(exchange, kind, row);
  exchange.put(key("sees/", where_.rank), row + (refused ? "r" : "-") + why_alone_);
  std::vector<std::string> rows;
  bool any_refused = false;
  for (int64_t rank = 0; rank < where_.world; ++rank) {
    const std::string text = exchange.get(key("sees/", rank));
    const auto world = static_cast<size_t>(where_.world);
    if (text.size() <= world) {
      throw Fault(FaultKind::kNotPossible,
                  error_text("host_group", "got '" + text + "' from rank " + std::to_string(rank),
                             where_, "Run the same Trireme on every rank."));
    }
    rows.push_back(text.substr(0, world));
    any_refused |= text[world] == 'r';
    if (why_alone_.empty()) why_alone_ = text.substr(world + 1);
  }
  // Takes its own row, whatever the Store returned: it cannot use a segment that it does not map.
  rows[static_cast<size_t>(where_.rank)] = row;
  // Every rank has opened the segments by now: names are no longer needed.
  for (Segment& segment : segments_) segment.unlink_name();
  if (any_refused && kind == SegmentKind::kAnonymous) {
    why_alone_.clear();
    return meet(exchange, SegmentKind::kNamed);
  }
  divide_into_hosts(rows);
}

// Fills `row` with one character per rank, '1' for ranks whose memory this rank shares. Returns
// true if a segment was refused that a named one could replace.
bool HostGroup::look_for_peers(Exchange& exchange, SegmentKind kind, std::string& row) {
  const std::string round = kind == SegmentKind::kAnonymous ? "anonymous/" : "named/";
  const std::string here = pid_namespace() + "\n" + request_.partition;
  bool refused = false;
  for (int64_t rank = 0; rank < where_.world; ++rank) {
    const std::string text = exchange.get(round + "address/" + std::to_string(rank));
    std::string why_not;
    if (text.starts_with(kFailed)) {
      const std::string reason = text.substr(std::min(kFailed.size() + 1, text.size()));
      if (text.substr(kFailed.size(), 1) == "1") throw Fault(FaultKind::kMemory, reason);
      why_not = reason;
      refused = true;
    } else if (rank != where_.rank) {
      const size_t line = std::min(text.find('\n'), text.size());
      const auto address = SegmentAddress::parse(std::string_view(text).substr(0, line));
      Segment segment;
      if (!address || line == text.size() || text.substr(line + 1) != here) {
        why_not = "rank " + std::to_string(rank) + " runs elsewhere";
      } else if (address->bytes != static_cast<int64_t>(sizeof(RankBlock))) {
        why_not = "rank " + std::to_string(rank) + " runs another Trireme";
      } else {
        segment = Segment::open(*address, why_not);
        refused |= !segment && why_not.starts_with("cannot");
      }
      if (segment) {
        try {
          processes_[static_cast<size_t>(rank)] = PeerProcess(address->pid);
        } catch (const Fault& fault) {
          why_not = fault.what();
          segment = Segment();
        }
      }
      segments_[static_cast<size_t>(rank)] = std::move(segment);
    }
    const bool sees = static_cast<bool>(segments_[static_cast<size_t>(rank)]);
    row += sees ? '1' : '0';
    if (!sees && why_alone_.empty()) why_alone_ = why_not;
  }
  return refused;
}

void HostGroup::divide_into_hosts(const std::vector<std::string>& rows) {
  const auto world = static_cast<size_t>(where_.world);
  std::vector<bool> placed(world, false);
  for (size_t first = 0; first < world; ++first) {
    if (placed[first]) continue;
    std::vector<int64_t> host;
    for (size_t rank = first; rank < world; ++rank)
      if (rank == first || rows[first][rank] == '1') host.push_back(static_cast<int64_t>(rank));
    const bool unanimous = std::all_of(host.begin(), host.end(), [&](int64_t a) {
      return std::all_of(host.begin(), host.end(), [&](int64_t b) {
        return !placed[static_cast<size_t>(b)] &&
               (a == b || rows[static_cast<size_t>(a)][static_cast<size_t>(b)] == '1');
      });
    });
    if (!unanimous) host = {static_cast<int64_t>(first)};
    for (const int64_t rank : host) placed[static_cast<size_t>(rank)] = true;
    hosts_.push_back(host);
    if (std::find(host.begin(), host.end(), where_.rank) != host.end()) members_ = host;
  }

  std::vector<Segment> segments;
  std::vector<PeerProcess> processes;
  for (const int64_t rank : members_) {
    if (rank == where_.rank) rank_ = static_cast<int64_t>(segments.size());
    segments.push_back(std::move(segments_[static_cast<size_t>(rank)]));
    processes.push_back(std::move(processes_[static_cast<size_t>(rank)]));
  }
  segments_ = std::move(segments);
  processes_ = std::move(processes);
  if (!segments_[static_cast<size_t>(rank_)]) return;  // alone, and without memory to share
  for (const Segment& segment : segments_)
    blocks_.push_back(std::launder(reinterpret_cast<RankBlock*>(segment.data())));
  flag_wait_ = std::make_unique<FlagWait>(block(rank_).futex, this->world());
  block(rank_).group = segments_.front().address().nonce;
  block(rank_).members = static_cast<int32_t>(members_.size());
  block(rank_).state.store(RankState::kHere, std::memory_order_release);
}

HostGroup::~HostGroup() {
  if (blocks_.empty() || fork_guard_.in_child()) return;
  leave({});
}

uint64_t HostGroup::begin(const Operation& operation, std::chrono::milliseconds timeout) {
  check_usable();
  timeout_ = saturated(timeout.count() > 0 ? timeout : this->timeout());
  deadline_ = deadline_after(timeout_);
  if (has_abandoned()) rejoin();
  ++sequence_;
  block(rank_).records[sequence_ % kRecords].write(sequence_, operation);
  entered_ = false;
  return sequence_;
}

void HostGroup::enter() {
  if (!entered_) publish(&RankBlock::entered, sequence_);
}

void HostGroup::publish(Counter counter, uint64_t value) {
  RankBlock& own = block(rank_);
  (own.*counter).store(value, std::memory_order_seq_cst);
  if (!std::exchange(entered_, true)) own.entered.store(sequence_, std::memory_order_seq_cst);
  wake_peers();
}

void HostGroup::wake_peers() {
  for (RankBlock* peer : blocks_)
    if (peer != blocks_[static_cast<size_t>(rank_)]) ring(peer->futex);
}

void HostGroup::check_entered() {
  enter();
  wait_all(&RankBlock::entered, sequence_);
  // Another thread of this rank may have left it meanwhile. Ranks that entered since must hear of
  // that, and do once they wait for this rank.
  if (has_abandoned()) throw_fault(FaultKind::kAbandoned, current(), left_by(rank_));
  const size_t index = sequence_ % kRecords;
  const Record& mine = block(rank_).records[index];
  for (int64_t peer = 0; peer < world(); ++peer) {
    const Record& theirs = block(peer).records[index];
    if (theirs.fingerprint == mine.fingerprint) continue;
    finish();
    throw Fault(
        FaultKind::kMismatch,
        error_text(
            "host_group",
            "ranks do not agree about collective " + std::to_string(sequence_) + ": " +
                describe_mismatch(where_.rank, mine, members_[static_cast<size_t>(peer)], theirs),
            where_,
            "Call the same collectives in the same order on every rank; nothing "
            "was moved by this one."));
  }
}

void HostGroup::make_rings() {
  if (rings_.empty()) rings_ = share_segments(ring_bytes_);
}

// Writes the address of memory, or that there is none, to a board of this rank's own.
void HostGroup::tell(const std::string& text) {
  std::array<char, 512>& board = block(rank_).ring_address;
  const size_t length = std::min(text.size(), board.size() - 1);
  std::memcpy(board.data(), text.data(), length);
  board[length] = '\0';
}

std::string_view HostGroup::told_by(int64_t peer) const {
  const auto& board = blocks_[static_cast<size_t>(peer)]->ring_address;
  return {board.data(), ::strnlen(board.data(), board.size())};
}

void HostGroup::all_have_told() {
  publish(&RankBlock::ring_made, ++ring_attempts_);
  wait_all(&RankBlock::ring_made, ring_attempts_);
}

// Returns the message of the first rank that has no memory.
std::string HostGroup::complaint() const {
  for (int64_t peer = 0; peer < world(); ++peer) {
    const std::string_view text = told_by(peer);
    if (!text.starts_with(kFailed)) continue;
    return "rank " + std::to_string(members_[static_cast<size_t>(peer)]) +
           " says: " + std::string(text.substr(kFailed.size()));
  }
  return {};
}

// Opens the segment whose address that rank wrote, if it has that many bytes.
Segment HostGroup::open_told(int64_t peer, int64_t bytes, std::string& why_not,
                             bool keeps_file) const {
  const auto address = SegmentAddress::parse(told_by(peer));
  if (address && address->bytes == bytes) return Segment::open(*address, why_not, keeps_file);
  why_not = "rank " + std::to_string(members_[static_cast<size_t>(peer)]) + " left no address of " +
            std::to_string(bytes) + " bytes";
  return {};
}

// A rank without memory writes that in place of the address; a rank that cannot map another's
// segment writes it there too, once all have read the address.
std::vector<Segment> HostGroup::share_segments(int64_t bytes) {
  std::vector<Segment> segments(blocks_.size());
  try {
    Segment& own = segments[static_cast<size_t>(rank_)];
    own = Segment::create(segment_kind(), bytes);
    tell(own.address().to_string());
  } catch (const Fault& fault) {
    tell(std::string(kFailed) + fault.what());
  }
  all_have_told();
  std::string why_unreachable;
  for (int64_t peer = 0; peer < world(); ++peer) {
    if (peer == rank_ || told_by(peer).starts_with(kFailed)) continue;
    segments[static_cast<size_t>(peer)] = open_told(peer, bytes, why_unreachable);
  }
  // No segment may go before all ranks have read all addresses, and opened what they could.
  publish(&RankBlock::rings_mapped, ring_attempts_);
  wait_all(&RankBlock::rings_mapped, ring_attempts_);
  if (!why_unreachable.empty()) tell(std::string(kFailed) + why_unreachable);
  all_have_told();
  if (const std::string why = complaint(); !why.empty()) {
    throw Fault(FaultKind::kMemory,
                error_text("host_group", "got no memory for " + current() + ": " + why, where_,
                           "Free memory and call it again."));
  }
  for (Segment& segment : segments) segment.unlink_name();
  return segments;
}

// Lets the first rank make it. The boards are free again when all have entered the next collective.
SharedSegment HostGroup::share_segment(int64_t bytes) {
  SharedSegment shared;
  std::string text;
  if (rank_ == 0) {
    try {
      shared.segment = Segment::create(segment_kind(), bytes, world());
      text = shared.segment.address().to_string();
    } catch (const Fault& fault) {
      text = std::string(kFailed) + fault.what();
    }
  }
  tell(text);
  all_have_told();
  if (rank_ != 0 && !told_by(0).starts_with(kFailed)) {
    std::string why_not;
    shared.segment = open_told(0, bytes, why_not, /*keeps_file=*/true);
    if (!shared.segment || !shared.segment.reserve(rank_, world(), why_not))
      tell(std::string(kFailed) + why_not);
  }
  all_have_told();
  shared.why_not = complaint();
  if (!shared.why_not.empty()) shared.segment = Segment();
  shared.segment.unlink_name();
  return shared;
}

void HostGroup::finish() {
  block(rank_).records[sequence_ % kRecords].finished_ns.store(
      Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

}  // namespace trireme::shm
