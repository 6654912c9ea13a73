#pragma once

#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/segment.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace trireme::shm {

// [Note: slots of a channel]
//
// A channel carries messages from one rank to another one of its host. The sender owns slots, each
// a segment of its own, which it makes when a message finds none that is free and large enough. It
// copies a message into one and announces it in a ring of heads that both map. The receiver maps a
// slot when a head first names its segment, and reads the message in place. The slot is busy until
// the receiver has let go of the message, which any thread of it does by one store into the slot.
//
// A sender waits while the receiver has more messages than the channel holds that it is not done
// with. It never waits for a slot: a receiver that keeps a message for longer keeps memory and
// delays no sender. Each slot is an open file of the sender, though, and a map of both, and a
// process may have only so many. So the sender lends a bounded number of slots, and of bytes.
// Beyond that the receiver copies each message to memory of its own, and the slot is free at once.
// A small free slot is replaced rather than joined by a larger one. Once more slots are free than
// the channel holds messages, or would be lent, the last ones go.
//
// If the system gives no memory, or no file, for a slot, a channel with a reserve sends small
// messages, such as the error that reports this, through that: it lies in the memory of the channel
// itself, and the receiver always copies out of it. While messages are on their way such a channel
// reports that it is full instead, since their slots will be free.

// The beginning of each slot; zeros are a free one.
struct SlotBlock {
  alignas(kCacheLine) std::atomic<uint64_t> released;  // number of the last message released
};

// A message in the ring. Plain memory that the sender writes before it counts it as sent.
struct MessageHead {
  uint64_t sequence = 0;  // counts the messages of the channel from 1
  int64_t step = 0;
  int64_t micro_batch = 0;
  // Bytes in the slot: description and text from its beginning, one behind the other, then the
  // payload from the next multiple of a cache line.
  int64_t description_bytes = 0;
  int64_t text_bytes = 0;
  int64_t payload_bytes = 0;
  uint32_t slot = 0;    // kReserve: the message lies in the reserve
  uint32_t slots = 0;   // slots that the sender has
  bool is_lent = true;  // the receiver may keep it in its slot
  SegmentAddress address{};

  int64_t payload_begin() const {
    return (description_bytes + text_bytes + int64_t{kCacheLine} - 1) / int64_t{kCacheLine} *
           int64_t{kCacheLine};
  }
  int64_t bytes() const { return payload_begin() + payload_bytes; }
  static constexpr uint32_t kReserve = UINT32_MAX;
};
static_assert(std::is_trivially_copyable_v<MessageHead>);

// The beginning of a channel's memory, before the ring of heads and the reserve; zeros are an empty
// channel.
struct ChannelBlock {
  alignas(kCacheLine) std::atomic<uint64_t> sent;
  alignas(kCacheLine) std::atomic<uint64_t> done;
};

// Returns the bytes of memory, shared by both ranks, of a channel for `messages` messages.
TRIREME_API int64_t channel_bytes(int64_t messages, int64_t reserve_bytes = 0);

// The most that a receiver may keep of a sender's slots at one time.
struct LentMemory {
  int64_t slots = 0;
  int64_t bytes = 0;
};
// Returns the share of one of `peers` peers, by the limit on open files of this process, and for
// kNamed by the size of /dev/shm.
TRIREME_API LentMemory most_lent(SegmentKind kind, int64_t peers);

// One end of a channel.
struct ChannelEnd {
  int64_t peer = 0;             // the other end, as rank of the host
  std::byte* memory = nullptr;  // channel_bytes(), zeros at first, aligned to a cache line
  int64_t messages = 1;         // messages that it holds at once
  bool spares_group = false;    // a peer that is gone with a message ends this channel alone
  int64_t reserve_bytes = 0;    // for messages without memory for a slot
};

// The sending end. One thread at a time. Throws Fault, see HostGroup: then nothing was sent.
class TRIREME_API SlotSender {
 public:
  SlotSender(HostGroup& group, const ChannelEnd& end);
  // Loses messages that were not received by now.
  ~SlotSender();
  SlotSender(const SlotSender&) = delete;
  SlotSender& operator=(const SlotSender&) = delete;

  // Returns true also if a slot was refused while messages whose slots will be free are underway.
  bool is_full() const;
  // Returns whether the receiver is done with all messages.
  bool is_drained() const;
  // Waits until it is not full. `context` names the wait in errors.
  void wait(std::string_view context);
  // Returns memory for that many bytes of a message, aligned to a cache line; the next send() sends
  // it. The channel is not full. Throws Fault(kMemory), after which it may be.
  std::byte* slot_for(int64_t bytes);
  // Returns whether slot_for() found no memory last, while messages were on their way.
  bool was_refused_for_now() const { return was_refused_for_now_; }
  // Sends the content of the slot. Sequence, slot and address of the head are filled in.
  void send(MessageHead head);
  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }

 private:
  struct Slot {
    Segment segment;
    uint64_t sequence = 0;  // number of the last message in it
    bool is_free() const;
  };
  void drop_surplus(int64_t free);
  std::byte* make_slot(Slot& slot, int64_t needed);

  HostGroup& group_;
  ChannelEnd end_;
  ChannelBlock& block_;
  LentMemory most_;
  std::vector<Slot> slots_;
  size_t chosen_ = 0;     // kReserve: the reserve
  LentMemory busy_ = {};  // without the chosen slot
  uint64_t sent_ = 0;
  uint64_t full_until_ = 0;  // full until that many messages are done
  bool was_refused_for_now_ = false;
};

// A received message, in its slot or in a copy. Its last owner may be any thread, and may outlive
// the host group. Does nothing in a forked child, whose parent has it, too.
class TRIREME_API HeldSlot {
 public:
  HeldSlot(std::shared_ptr<const Segment> segment, uint64_t sequence);
  // Copies a message from its place.
  HeldSlot(const std::byte* message, int64_t bytes);
  ~HeldSlot();
  HeldSlot(const HeldSlot&) = delete;
  HeldSlot& operator=(const HeldSlot&) = delete;
  std::byte* data() const { return copy_ ? copy_.get() : segment_->data() + sizeof(SlotBlock); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> copy_;
  std::shared_ptr<const Segment> segment_;
  uint64_t sequence_ = 0;
  ForkGuard fork_guard_;
};

// The receiving end. One thread at a time. Throws Fault, see HostGroup.
class TRIREME_API SlotReceiver {
 public:
  SlotReceiver(HostGroup& group, const ChannelEnd& end);
  SlotReceiver(const SlotReceiver&) = delete;
  SlotReceiver& operator=(const SlotReceiver&) = delete;

  bool is_empty() const;
  // Waits until it is not empty. `context` names the wait in errors.
  void wait(std::string_view context);
  struct Message {
    MessageHead head;
    std::shared_ptr<HeldSlot> slot;
  };
  // Returns the next message of a channel that is not empty. Its head describes the slot's content.
  Message take_message();
  // Lets the sender send one message more. Called once for each message that was taken.
  void done_with_one() { publish_done(done_ + 1); }
  // Drops messages of earlier steps that are there, and is done with those that it has taken.
  void forget_before(int64_t step);

 private:
  MessageHead next_head() const;
  std::shared_ptr<HeldSlot> held(const MessageHead& head);
  void publish_done(uint64_t done);
  std::shared_ptr<const Segment> map(const MessageHead& head);
  [[noreturn]] void report_overwritten(const MessageHead& head);

  HostGroup& group_;
  ChannelEnd end_;
  ChannelBlock& block_;
  std::map<uint32_t, std::shared_ptr<const Segment>> mapped_;  // key: slot
  uint64_t received_ = 0;
  uint64_t done_ = 0;
};

}  // namespace trireme::shm
