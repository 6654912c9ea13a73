#include <trireme/shm/slot_channel.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <utility>

namespace trireme::shm {
namespace {

constexpr std::string_view kArea = "slot_channel";
constexpr int64_t kPage = 4096;
constexpr auto kSlotBlockBytes = static_cast<int64_t>(sizeof(SlotBlock));

// The number of slots that a pipeline of many micro-batches has on their way at one time.
constexpr int64_t kMostLentSlots = 64;
constexpr int64_t kLeastLentSlots = 4;
constexpr int64_t kMostLentBytes = int64_t{1} << 30;
// Slots take at most this fraction of a process's limits.
constexpr int64_t kShareOfLimits = 8;

// Returns an eighth more than asked for at most, in pages, so that messages which differ a little
// fit the same slots.
int64_t rounded(int64_t bytes) {
  int64_t step = kPage;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

ChannelBlock& block_of(const ChannelEnd& end) {
  return *reinterpret_cast<ChannelBlock*>(end.memory);
}

int64_t in_lines(int64_t bytes) {
  return (bytes + int64_t{kCacheLine} - 1) / int64_t{kCacheLine} * int64_t{kCacheLine};
}

// Returns where in the memory of a channel its reserve begins.
int64_t reserve_begin(int64_t messages) {
  return in_lines(static_cast<int64_t>(sizeof(ChannelBlock)) +
                  messages * static_cast<int64_t>(sizeof(MessageHead)));
}

std::byte* reserve_of(const ChannelEnd& end) { return end.memory + reserve_begin(end.messages); }

std::byte* head_at(const ChannelEnd& end, uint64_t sequence) {
  const uint64_t place = (sequence - 1) % static_cast<uint64_t>(end.messages);
  return end.memory + sizeof(ChannelBlock) + place * sizeof(MessageHead);
}

SlotBlock& slot_block(const Segment& segment) {
  return *reinterpret_cast<SlotBlock*>(segment.data());
}

// Refuses messages after abandoned work, before all ranks have met again.
void check_usable(HostGroup& group) {
  group.check_usable();
  if (group.has_abandoned()) throw Fault(FaultKind::kAbandoned, group.why_abandoned());
}

std::string name_of(HostGroup& group, int64_t peer) {
  return "rank " + std::to_string(group.members()[static_cast<size_t>(peer)]);
}

}  // namespace

int64_t channel_bytes(int64_t messages, int64_t reserve_bytes) {
  return reserve_begin(messages) + in_lines(reserve_bytes);
}

LentMemory most_lent(SegmentKind kind, int64_t peers) {
  LentMemory most{kMostLentSlots, kMostLentBytes};
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur != RLIM_INFINITY)
    most.slots = std::clamp(static_cast<int64_t>(files.rlim_cur) / (kShareOfLimits * peers),
                            kLeastLentSlots, kMostLentSlots);
  struct statvfs memory{};
  if (kind == SegmentKind::kNamed && ::statvfs("/dev/shm", &memory) == 0 && memory.f_blocks > 0)
    most.bytes = std::min(most.bytes, static_cast<int64_t>(memory.f_blocks * memory.f_frsize) /
                                          (kShareOfLimits * peers));
  return most;
}

bool SlotSender::Slot::is_free() const {
  return !segment || slot_block(segment).released.load(std::memory_order_acquire) == sequence;
}

SlotSender::SlotSender(HostGroup& group, const ChannelEnd& end)
    : group_(group),
      end_(end),
      block_(block_of(end)),
      most_(most_lent(group.segment_kind(), std::max<int64_t>(group.world() - 1, 1))) {}

SlotSender::~SlotSender() = default;

bool SlotSender::is_full() const {
  const uint64_t done = block_.done.load(std::memory_order_acquire);
  return sent_ >= done + static_cast<uint64_t>(end_.messages) || done < full_until_;
}

bool SlotSender::is_drained() const { return block_.done.load(std::memory_order_acquire) >= sent_; }

void SlotSender::wait(std::string_view context) {
  was_refused_for_now_ = false;
  check_usable(group_);
  const auto room = static_cast<uint64_t>(end_.messages);
  const uint64_t done = std::max(sent_ < room ? 0 : sent_ + 1 - room, full_until_);
  if (done == 0) return;
  group_.wait_beside(end_.peer, block_.done, done, {context, group_.timeout()});
}

// Takes the first free slot that is large enough, so that few are used, and stay in the caches.
std::byte* SlotSender::slot_for(int64_t bytes) {
  was_refused_for_now_ = false;  // set again if memory is refused below
  check_usable(group_);
  const int64_t needed = bytes + kSlotBlockBytes;
  const uint64_t done = block_.done.load(std::memory_order_acquire);
  size_t fits = slots_.size();
  size_t replaced = slots_.size();
  int64_t free = 0;
  busy_ = {};
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    // A receiver that is done with it has mapped it.
    if (slot.sequence <= done) slot.segment.unlink_name();
    if (!slot.is_free()) {
      ++busy_.slots;
      busy_.bytes += slot.segment.bytes();
      continue;
    }
    ++free;
    if (!slot.segment || slot.segment.bytes() < needed) {
      replaced = std::min(replaced, i);
    } else {
      fits = std::min(fits, i);
    }
  }
  drop_surplus(free);
  chosen_ = std::min(fits < slots_.size() ? fits : replaced, slots_.size());
  if (chosen_ == slots_.size()) slots_.emplace_back();
  Slot& slot = slots_[chosen_];
  if (slot.segment && slot.segment.bytes() >= needed) return slot.segment.data() + kSlotBlockBytes;
  try {
    return make_slot(slot, needed);
  } catch (const Fault& fault) {
    if (fault.kind() != FaultKind::kMemory || end_.reserve_bytes == 0) throw;
    // Judges by the state when the slots were looked at: one that is free since will be found.
    was_refused_for_now_ = done < sent_;
    if (was_refused_for_now_) full_until_ = done + 1;
    if (was_refused_for_now_ || bytes > end_.reserve_bytes) throw;
    chosen_ = MessageHead::kReserve;
    return reserve_of(end_);
  }
}

void SlotSender::drop_surplus(int64_t free) {
  const int64_t kept = std::min(end_.messages, most_.slots);
  for (; free > kept && slots_.back().is_free(); --free) slots_.pop_back();
}

std::byte* SlotSender::make_slot(Slot& slot, int64_t needed) {
  slot.segment = Segment();  // first, so that there is room for the other one
  slot.sequence = 0;
  slot.segment = Segment::create(group_.segment_kind(), rounded(needed));
  return slot.segment.data() + kSlotBlockBytes;
}

void SlotSender::send(MessageHead head) {
  head.sequence = ++sent_;
  head.slot = static_cast<uint32_t>(chosen_);
  head.slots = static_cast<uint32_t>(slots_.size());
  if (chosen_ == MessageHead::kReserve) {
    head.is_lent = false;
  } else {
    Slot& slot = slots_[chosen_];
    slot.sequence = sent_;
    head.address = slot.segment.address();
    head.is_lent = busy_.slots < most_.slots && busy_.bytes + head.address.bytes <= most_.bytes;
  }
  std::memcpy(head_at(end_, sent_), &head, sizeof(head));
  block_.sent.store(sent_, std::memory_order_seq_cst);
  ring(group_.block(end_.peer).futex);
}

HeldSlot::HeldSlot(std::shared_ptr<const Segment> segment, uint64_t sequence)
    : segment_(std::move(segment)), sequence_(sequence) {}

HeldSlot::HeldSlot(const std::byte* message, int64_t bytes)
    : copy_(static_cast<std::byte*>(::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)),
                                                   std::align_val_t{kCacheLine}))) {
  std::memcpy(copy_.get(), message, static_cast<size_t>(bytes));
}

HeldSlot::~HeldSlot() {
  if (segment_ && !fork_guard_.in_child())
    slot_block(*segment_).released.store(sequence_, std::memory_order_release);
}

void HeldSlot::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{kCacheLine});
}

SlotReceiver::SlotReceiver(HostGroup& group, const ChannelEnd& end)
    : group_(group), end_(end), block_(block_of(end)) {}

bool SlotReceiver::is_empty() const {
  return block_.sent.load(std::memory_order_acquire) <= received_;
}

void SlotReceiver::wait(std::string_view context) {
  check_usable(group_);
  group_.wait_beside(end_.peer, block_.sent, received_ + 1, {context, group_.timeout()});
}

SlotReceiver::Message SlotReceiver::take_message() {
  check_usable(group_);
  Message message;
  const MessageHead& head = message.head = next_head();
  // Each is at most the slot, so that sums of them do not overflow.
  const bool in_reserve = head.slot == MessageHead::kReserve;
  const int64_t room = in_reserve ? end_.reserve_bytes : head.address.bytes - kSlotBlockBytes;
  const auto fits = [&](int64_t bytes) {
    return bytes >= 0 && bytes <= room && bytes < INT64_MAX / 4;
  };
  if (head.sequence != received_ + 1 || (!in_reserve && head.slot >= head.slots) ||
      !fits(head.description_bytes) || !fits(head.text_bytes) || !fits(head.payload_bytes) ||
      head.bytes() > room)
    report_overwritten(head);
  message.slot = held(head);
  ++received_;
  return message;
}

std::shared_ptr<HeldSlot> SlotReceiver::held(const MessageHead& head) {
  if (head.slot == MessageHead::kReserve)
    return std::make_shared<HeldSlot>(reserve_of(end_), head.bytes());
  auto slot = std::make_shared<HeldSlot>(map(head), head.sequence);
  if (head.is_lent) return slot;
  return std::make_shared<HeldSlot>(slot->data(), head.bytes());
}

MessageHead SlotReceiver::next_head() const {
  MessageHead head;
  std::memcpy(&head, head_at(end_, received_ + 1), sizeof(head));
  return head;
}

void SlotReceiver::publish_done(uint64_t done) {
  done_ = done;
  block_.done.store(done_, std::memory_order_seq_cst);
  ring(group_.block(end_.peer).futex);
}

void SlotReceiver::forget_before(int64_t step) {
  while (!is_empty() && next_head().step < step) take_message();
  if (done_ < received_) publish_done(received_);
}

std::shared_ptr<const Segment> SlotReceiver::map(const MessageHead& head) {
  mapped_.erase(mapped_.lower_bound(head.slots), mapped_.end());
  std::shared_ptr<const Segment>& mapped = mapped_[head.slot];
  if (mapped && mapped->address() == head.address) return mapped;
  mapped.reset();
  std::string why_not;
  const auto told = SegmentAddress::parse(head.address.to_string());
  if (!told) report_overwritten(head);
  Segment segment = Segment::open(*told, why_not);
  if (!segment) {
    // A sender that has ended takes its slots along.
    group_.wait_for_end(end_.peer);
    group_.check_usable();
    const std::string absence = group_.absence_of(end_.peer);
    const std::string text = error_text(
        kArea,
        absence.empty() ? "cannot see what " + name_of(group_, end_.peer) + " sends: " + why_not
                        : "the message is lost: " + absence,
        group_.where(),
        absence.empty() ? "Look at the limits on open files and memory."
                        : group_.advice_on_absence());
    if (!end_.spares_group || absence.empty()) group_.fail(text);
    throw Fault(absence.empty() ? FaultKind::kMemory : FaultKind::kPeerLost, text);
  }
  return mapped = std::make_shared<const Segment>(std::move(segment));
}

void SlotReceiver::report_overwritten(const MessageHead& head) {
  const std::string text = error_text(
      kArea,
      "got message " + std::to_string(head.sequence) + " of " +
          std::to_string(head.description_bytes) + ", " + std::to_string(head.text_bytes) +
          " and " + std::to_string(head.payload_bytes) + " bytes in slot " +
          std::to_string(head.slot) + " of " + std::to_string(head.slots) + ", expected message " +
          std::to_string(received_ + 1) + ", from " + name_of(group_, end_.peer) +
          ": its memory was overwritten",
      group_.where(), "Look for stray writes in that process.");
  group_.fail(text);
  throw Fault(FaultKind::kAborted, text);
}

}  // namespace trireme::shm
