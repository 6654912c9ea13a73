#include <trireme/comm/shared_log.h>

#include <trireme/comm/communicator.h>
#include <trireme/shm/segment.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

namespace trireme {
namespace {

constexpr size_t kSlotBytes = 512;
constexpr uint64_t kFewestSlots = 1024;
constexpr uint64_t kSlotsPerRank = 64;
constexpr uint64_t kMostSlots = 16384;

}  // namespace

// What a rank shows the others. The first line also has the number of the next slot.
struct SharedLog::Line {
  alignas(shm::kCacheLine) std::atomic<uint64_t> read{0};  // how many slots the rank has read
  std::atomic<uint32_t> reader{0};
  alignas(shm::kCacheLine) std::atomic<uint64_t> taken{0};
  shm::Futex waiting;
  shm::Futex beside;
};

struct SharedLog::Slot {
  alignas(shm::kCacheLine) std::atomic<uint64_t> number{0};  // from 1, once it is written
  uint32_t from = 0;
  uint16_t bytes = 0;
  bool is_last = true;
  std::array<char, kSlotBytes - 16> text{};
};

int64_t SharedLog::bytes_for(int64_t world, uint64_t slots) {
  static_assert(sizeof(Slot) == kSlotBytes);
  return world * static_cast<int64_t>(sizeof(Line)) + static_cast<int64_t>(slots * sizeof(Slot));
}

std::unique_ptr<SharedLog> SharedLog::make(Communicator& communicator) {
  Host* host = communicator.host();
  if (host == nullptr || communicator.world() == 1) return nullptr;
  const RankOf where = communicator.rank_of();
  const auto wanted = static_cast<uint64_t>(where.world) * kSlotsPerRank;
  const uint64_t slots = std::clamp(wanted, kFewestSlots, kMostSlots);
  auto memory = host->share_memory(bytes_for(where.world, slots), "order of names").segment;
  if (memory == nullptr) return nullptr;
  return std::unique_ptr<SharedLog>(new SharedLog(std::move(memory), where, slots));
}

SharedLog::SharedLog(std::shared_ptr<const shm::Segment> memory, RankOf where, uint64_t slots)
    : memory_(std::move(memory)),
      where_(where),
      slots_(slots),
      begun_(static_cast<size_t>(where.world)) {}

SharedLog::Line& SharedLog::line(int64_t rank) const {
  return reinterpret_cast<Line*>(memory_->data())[rank];
}

SharedLog::Slot& SharedLog::slot(uint64_t number) const {
  auto* first = memory_->data() + static_cast<size_t>(where_.world) * sizeof(Line);
  return reinterpret_cast<Slot*>(first)[number % slots_];
}

shm::Futex& SharedLog::futex_of(Reader reader) {
  Line& own = line(where_.rank);
  return reader == Reader::kWaiting ? own.waiting : own.beside;
}

// --- appending -----------------------------------------------------------------------------------

void SharedLog::append(std::string_view text) {
  constexpr size_t kMost = sizeof(Slot::text);
  if (text.size() <= kMost && unposted_.empty() && try_put(text, true)) return;
  do {
    const std::string_view part = text.substr(0, kMost);
    text.remove_prefix(part.size());
    unposted_.push_back({std::string(part), text.empty()});
  } while (!text.empty());
  post();
}

bool SharedLog::post() {
  bool any = false;
  while (!unposted_.empty() && try_put(unposted_.front().text, unposted_.front().is_last)) {
    unposted_.pop_front();
    any = true;
  }
  if (!unposted_.empty()) wake_others(true);  // to read, which makes room
  return any;
}

uint64_t SharedLog::slowest() const {
  uint64_t least = line(0).read.load(std::memory_order_acquire);
  for (int64_t rank = 1; rank < where_.world; ++rank)
    least = std::min(least, line(rank).read.load(std::memory_order_acquire));
  return least;
}

bool SharedLog::try_put(std::string_view text, bool is_last) {
  std::atomic<uint64_t>& next = line(0).taken;
  uint64_t number = next.load(std::memory_order_relaxed);
  do {
    if (number - known_slowest_ >= slots_) known_slowest_ = slowest();
    if (number - known_slowest_ >= slots_) return false;
  } while (!next.compare_exchange_weak(number, number + 1, std::memory_order_acq_rel));
  Slot& free = slot(number);
  free.from = static_cast<uint32_t>(where_.rank);
  free.bytes = static_cast<uint16_t>(text.size());
  free.is_last = is_last;
  std::memcpy(free.text.data(), text.data(), text.size());
  free.number.store(number + 1, std::memory_order_seq_cst);
  return true;
}

// --- reading -------------------------------------------------------------------------------------

std::optional<SharedLog::Entry> SharedLog::take() {
  for (;;) {
    Slot& next = slot(read_);
    if (next.number.load(std::memory_order_seq_cst) != read_ + 1) return std::nullopt;
    const int64_t from = next.from;
    const bool is_last = next.is_last;
    std::string& text = begun_[static_cast<size_t>(from)];
    text.append(next.text.data(), next.bytes);
    line(where_.rank).read.store(++read_, std::memory_order_release);
    if (!is_last) continue;
    Entry entry{from, std::move(text)};
    text.clear();
    return entry;
  }
}

void SharedLog::set_reader(Reader reader) {
  line(where_.rank).reader.store(static_cast<uint32_t>(reader), std::memory_order_seq_cst);
}

void SharedLog::wake_others(bool all) {
  for (int64_t rank = 0; rank < where_.world; ++rank) {
    if (rank == where_.rank) continue;
    Line& other = line(rank);
    const auto reader = static_cast<Reader>(other.reader.load(std::memory_order_seq_cst));
    if (reader == Reader::kWaiting) shm::ring(other.waiting);
    if (all || reader == Reader::kBeside) shm::ring(other.beside);
  }
}

void SharedLog::wake() {
  shm::ring(line(where_.rank).waiting);
  shm::ring(line(where_.rank).beside);
}

}  // namespace trireme
