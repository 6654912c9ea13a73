#include <trireme/comm/memory_channel.h>

#include <trireme/comm/message_head.h>
#include <trireme/comm/translate_faults.h>
#include <trireme/common/error.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/segment.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

namespace trireme {

namespace {

constexpr int64_t kSlotHeadBytes = 64;  // holds `released`
constexpr int64_t kPage = 4096;

// Says where a message lies.
struct MessagePlace {
  int64_t slot = 0;
  int64_t generation = 0;  // counts the segments that a slot has had
  int64_t head_bytes = 0;
  int64_t bytes = 0;  // with the head
  std::array<char, 192> address{};
};

}  // namespace

struct MemoryChannelBlock {
  alignas(64) std::atomic<uint64_t> sent{0};
  alignas(64) std::atomic<uint64_t> done{0};
};

namespace {

MessagePlace& place_of(std::byte* block, uint64_t message, int64_t slots) {
  auto* places = reinterpret_cast<MessagePlace*>(block + sizeof(MemoryChannelBlock));
  return places[message % static_cast<uint64_t>(slots)];
}

std::atomic<uint64_t>& released_of(std::byte* slot) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(slot);
}

class MemoryEnd {
 protected:
  explicit MemoryEnd(MemoryChannelRequest request)
      : request_(std::move(request)),
        block_(*reinterpret_cast<MemoryChannelBlock*>(request_.block)) {}

  void wait(const std::atomic<uint64_t>& counter, uint64_t target, const std::string& name) const {
    translate_faults([&] {
      request_.group->wait_beside(request_.peer, counter, target,
                                  {name, request_.group->timeout()});
    });
  }
  void check_usable() const {
    translate_faults([&] { request_.group->check_usable(); });
  }
  std::string describe(const std::string& label, const char* what) const {
    return label + ": " + what + " of " + request_.channel.name;
  }
  RankOf where() const { return request_.group->where(); }

  MemoryChannelRequest request_;
  MemoryChannelBlock& block_;
};

class MemorySender final : public TensorSender, MemoryEnd {
 public:
  explicit MemorySender(MemoryChannelRequest request) : MemoryEnd(std::move(request)) {}

  void send(const TensorMessage& message, const std::string& label) override {
    check_usable();
    const MessageHead head = MessageHead::of(message);
    const auto slots = static_cast<uint64_t>(request_.channel.slots);
    if (sent_ >= slots && block_.done.load(std::memory_order_acquire) + slots <= sent_) {
      wait(block_.done, sent_ + 1 - slots, describe(label, "room in the channel"));
    }
    const int64_t head_bytes = head.head_bytes();
    const int64_t bytes = head_bytes + head.payload_bytes;
    const size_t index = free_slot(bytes, label);
    Slot& slot = slots_[index];
    std::byte* data = slot.segment.data() + kSlotHeadBytes;
    head.write({data, static_cast<size_t>(head_bytes)});
    head.pack(message, data + head_bytes);
    slot.used_by = ++sent_;
    MessagePlace& place = place_of(request_.block, sent_ - 1, request_.channel.slots);
    place = {static_cast<int64_t>(index), slot.generation, head_bytes, bytes, slot.address};
    block_.sent.store(sent_, std::memory_order_seq_cst);
    request_.group->wake_peers();
  }

 private:
  struct Slot {
    shm::Segment segment;
    std::array<char, 192> address{};
    int64_t generation = 0;
    uint64_t used_by = 0;  // number of the message, from 1 on

    bool is_free() const {
      return !segment || released_of(segment.data()).load(std::memory_order_acquire) >= used_by;
    }
    bool holds(int64_t bytes) const { return segment && segment.bytes() - kSlotHeadBytes >= bytes; }
  };

  // Prefers a slot that is large enough, and a slot that is there to one that is not.
  size_t free_slot(int64_t bytes, const std::string& label) {
    size_t found = slots_.size();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].is_free()) continue;
      found = i;
      if (slots_[i].holds(bytes)) return i;
    }
    if (found == slots_.size()) slots_.emplace_back();
    make_segment(slots_[found], bytes, label);
    return found;
  }

  void make_segment(Slot& slot, int64_t bytes, const std::string& label) {
    const int64_t wanted = (kSlotHeadBytes + bytes + kPage - 1) / kPage * kPage;
    slot.segment = {};
    try {
      slot.segment = shm::Segment::create(request_.group->segment_kind(), wanted);
    } catch (const shm::Fault& fault) {
      C10_THROW_ERROR(DistBackendError,
                      error_text("tensor_channel", describe(label, "a slot") + ": " + fault.what(),
                                 where(), "Take fewer micro-batches at once, or smaller ones."));
    }
    new (slot.segment.data()) std::atomic<uint64_t>(0);
    const std::string address = slot.segment.address().to_string();
    TORCH_INTERNAL_ASSERT(address.size() < slot.address.size());
    slot.address.fill('\0');
    std::copy(address.begin(), address.end(), slot.address.begin());
    ++slot.generation;
    slot.used_by = 0;
  }

  uint64_t sent_ = 0;
  std::vector<Slot> slots_;
};

class MemoryReceiver final : public ForgetfulReceiver, MemoryEnd {
 public:
  explicit MemoryReceiver(MemoryChannelRequest request) : MemoryEnd(std::move(request)) {}

  TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) override {
    check_usable();
    if (block_.sent.load(std::memory_order_acquire) <= received_)
      wait(block_.sent, received_ + 1, describe(label, "a message"));
    const MessagePlace place = this->place(received_);
    const std::shared_ptr<shm::Segment>& segment = segment_of(place);
    std::byte* data = segment->data() + kSlotHeadBytes;
    MessageHead head = MessageHead::read({data, static_cast<size_t>(place.head_bytes)});
    TORCH_CHECK(head.payload_bytes <= place.bytes - place.head_bytes, "a message is cut off");
    check_message(head, step, micro_batch, request_.channel.name, where());
    ++received_;
    return std::move(head).unpack(data + place.head_bytes, [segment, number = received_] {
      released_of(segment->data()).store(number, std::memory_order_release);
    });
  }

  void done_with_one() override { publish(done_ + 1); }

  void forget_before(int64_t step) override {
    const uint64_t sent = block_.sent.load(std::memory_order_acquire);
    for (; received_ < sent; ++received_) {
      const MessagePlace place = this->place(received_);
      const std::shared_ptr<shm::Segment>& segment = segment_of(place);
      const std::byte* data = segment->data() + kSlotHeadBytes;
      if (MessageHead::read({data, static_cast<size_t>(place.head_bytes)}).step >= step) break;
      released_of(segment->data()).store(received_ + 1, std::memory_order_release);
    }
    if (done_ < received_) publish(received_);
  }

 private:
  void publish(uint64_t done) {
    done_ = done;
    block_.done.store(done_, std::memory_order_seq_cst);
    request_.group->wake_peers();
  }

  MessagePlace place(uint64_t message) const {
    return place_of(request_.block, message, request_.channel.slots);
  }

  const std::shared_ptr<shm::Segment>& segment_of(const MessagePlace& place) {
    if (static_cast<size_t>(place.slot) >= slots_.size())
      slots_.resize(static_cast<size_t>(place.slot) + 1);
    Slot& slot = slots_[static_cast<size_t>(place.slot)];
    if (slot.segment && slot.generation == place.generation) return slot.segment;
    const auto address = shm::SegmentAddress::parse(place.address.data());
    std::string why_not = "its address is none";
    shm::Segment opened;
    if (address) opened = shm::Segment::open(*address, why_not);
    if (!opened) {
      C10_THROW_ERROR(DistBackendError,
                      error_text("tensor_channel",
                                 "cannot open memory of " + request_.channel.name + ": " + why_not,
                                 where(), "See the error of the rank that sends."));
    }
    opened.unlink_name();
    slot = {std::make_shared<shm::Segment>(std::move(opened)), place.generation};
    return slot.segment;
  }

  struct Slot {
    std::shared_ptr<shm::Segment> segment;
    int64_t generation = 0;
  };
  uint64_t received_ = 0;
  uint64_t done_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace

int64_t memory_channel_bytes(const ChannelRequest& request) {
  return static_cast<int64_t>(sizeof(MemoryChannelBlock)) +
         (request.slots * static_cast<int64_t>(sizeof(MessagePlace)) + 63) / 64 * 64;
}

std::unique_ptr<TensorSender> make_memory_sender(MemoryChannelRequest request) {
  return std::make_unique<MemorySender>(std::move(request));
}

std::unique_ptr<ForgetfulReceiver> make_memory_receiver(MemoryChannelRequest request) {
  return std::make_unique<MemoryReceiver>(std::move(request));
}

}  // namespace trireme
