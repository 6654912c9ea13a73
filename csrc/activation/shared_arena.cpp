#include <trireme/activation/shared_arena.h>

#include <trireme/comm/host.h>
#include <trireme/common/forks.h>
#include <trireme/shm/segment.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kAlignBytes = 64;
constexpr int64_t kLeastSegment = int64_t{4} << 20;
constexpr size_t kBits = 63;  // slots that Place::dropped can name

int64_t aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

}  // namespace

// A mapped segment. A forked child writes to a private copy of it, so that it releases no block.
struct SharedArena::Block::Mapping {
  explicit Mapping(std::shared_ptr<const shm::Segment> given)
      : segment(std::move(given)), private_in_children(segment->private_in_children()) {}

  std::shared_ptr<const shm::Segment> segment;
  std::unique_ptr<PrivateInChildren> private_in_children;  // destroyed before the segment
};

SharedArena::Block::Block(std::shared_ptr<const Mapping> mapping, std::atomic<uint64_t>& released,
                          std::byte* data, uint64_t number)
    : mapping_(std::move(mapping)), released_(released), data_(data), number_(number) {
  released_.store(0, std::memory_order_relaxed);  // earlier data may look like a number
}

SharedArena::Block::~Block() { released_.store(number_, std::memory_order_release); }

SharedArena::SharedArena(Communicator& communicator)
    : communicator_(communicator),
      where_(communicator.rank_of()),
      head_bytes_(aligned(where_.world * static_cast<int64_t>(sizeof(uint64_t)))) {}

// Takes the smallest free run that is large enough. If there is none, drops segments that are
// wholly free and makes one of at least a quarter of what is left, so that there are few.
SharedArena::Place SharedArena::find_place(int64_t bytes) {
  std::erase_if(used_, [this](const Used& used) {
    const bool is_free = is_released(used);
    if (is_free) give_back(used.place);
    return is_free;
  });
  Place found{.bytes = head_bytes_ + aligned(bytes)};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < slots_.size(); ++i) {
    for (const auto& [offset, free] : slots_[i].free) {
      if (free < found.bytes || free >= least) continue;
      least = free;
      found.slot = static_cast<int64_t>(i);
      found.offset = offset;
    }
  }
  if (least < std::numeric_limits<int64_t>::max()) return found;
  int64_t left = 0;
  found.slot = static_cast<int64_t>(slots_.size());
  for (size_t i = slots_.size(); i-- > 0;) {
    const Slot& slot = slots_[i];
    const int64_t held = slot.mapping ? slot.mapping->segment->bytes() : 0;
    const bool is_free = held > 0 && slot.free.size() == 1 && slot.free.begin()->second == held;
    const bool goes = is_free && i < kBits;
    if (goes) found.dropped |= int64_t{1} << i;
    if (held == 0 || goes) found.slot = static_cast<int64_t>(i);
    if (!goes) left += held;
  }
  found.grows = std::max({found.bytes, left / 4, kLeastSegment});
  return found;
}

std::shared_ptr<SharedArena::Block> SharedArena::take(const Place& place, uint64_t number,
                                                      const std::string& label) {
  for (size_t i = 0; i < std::min(slots_.size(), kBits); ++i)
    if ((place.dropped >> i & 1) != 0) slots_[i] = Slot();
  const auto index = static_cast<size_t>(place.slot);
  if (place.grows > 0) {
    SharedMemory memory = communicator_.host()->share_memory(place.grows, label);
    if (!memory.segment) return nullptr;
    if (index == slots_.size()) slots_.emplace_back();
    slots_[index].mapping = std::make_shared<const Block::Mapping>(std::move(memory.segment));
    slots_[index].free.emplace(0, slots_[index].mapping->segment->bytes());
  }
  std::atomic<uint64_t>* head = head_of(place);
  if (where_.rank == 0) {
    auto& free = slots_[index].free;
    const auto run = free.find(place.offset);
    TORCH_INTERNAL_ASSERT(run != free.end() && run->second >= place.bytes);
    if (run->second > place.bytes)
      free.emplace(place.offset + place.bytes, run->second - place.bytes);
    free.erase(run);
    used_.push_back({place, number});
  }
  return std::shared_ptr<Block>(new Block(slots_[index].mapping, head[where_.rank],
                                          reinterpret_cast<std::byte*>(head) + head_bytes_,
                                          number));
}

int64_t SharedArena::bytes() const {
  int64_t sum = 0;
  for (const Slot& slot : slots_)
    if (slot.mapping) sum += slot.mapping->segment->bytes();
  return sum;
}

std::atomic<uint64_t>* SharedArena::head_of(const Place& place) const {
  std::byte* data = slots_[static_cast<size_t>(place.slot)].mapping->segment->data();
  return reinterpret_cast<std::atomic<uint64_t>*>(data + place.offset);
}

bool SharedArena::is_released(const Used& used) const {
  const std::atomic<uint64_t>* head = head_of(used.place);
  return std::all_of(head, head + where_.world, [&](const std::atomic<uint64_t>& released) {
    return released.load(std::memory_order_acquire) == used.number;
  });
}

void SharedArena::give_back(const Place& place) {
  auto& free = slots_[static_cast<size_t>(place.slot)].free;
  auto here = free.emplace(place.offset, place.bytes).first;
  const auto next = std::next(here);
  if (next != free.end() && here->first + here->second == next->first) {
    here->second += next->second;
    free.erase(next);
  }
  if (here == free.begin()) return;
  const auto before = std::prev(here);
  if (before->first + before->second == here->first) {
    before->second += here->second;
    free.erase(here);
  }
}

}  // namespace trireme
