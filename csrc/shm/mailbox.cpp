#include <trireme/shm/mailbox.h>

#include <trireme/common/duration.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace trireme::shm {
namespace {

constexpr auto kByteLine = static_cast<int64_t>(kCacheLine);
constexpr int64_t kLargestByteRing = 256 * 1024;
constexpr int64_t kSmallestByteRing = 64 * 1024;
constexpr int64_t kRingsOfARank = int64_t{1} << 20;

int64_t capacity_for(int64_t world) {
  return std::clamp(kRingsOfARank / world / kSmallestByteRing * kSmallestByteRing,
                    kSmallestByteRing, kLargestByteRing);
}

// Returns how much is published at once, so that the other side works while this one goes on.
int64_t chunk_of(int64_t capacity) { return capacity / 4; }

std::string bytes_of(int64_t bytes, Dtype dtype) {
  return std::to_string(bytes) + " bytes of " + std::string(name(dtype));
}

int64_t stride_of(int64_t capacity) {
  return static_cast<int64_t>(sizeof(ByteRingBlock)) + capacity;
}

}  // namespace

// The head of each message, at the beginning of a cache line, the rest of which is the payload's.
struct Mailbox::Header {
  int64_t tag;
  int64_t bytes;
  uint64_t sequence;
  Dtype dtype;
};

Mailbox::Mailbox(HostGroup& group)
    : group_(group),
      capacity_(capacity_for(group.world())),
      outboxes_(static_cast<size_t>(group.world())),
      inboxes_(static_cast<size_t>(group.world())) {
  static_assert(sizeof(Header) <= kCacheLine && std::is_trivially_copyable_v<Header>);
}

void Mailbox::post(const TransferPtr& transfer) {
  group_.check_usable();
  const bool limited = transfer->timeout.count() > 0;
  transfer->deadline = deadline_after(limited ? transfer->timeout : group_.timeout());
  if (transfer->kind == Transfer::Kind::kSend) {
    if (!segment_) make_outbox();
    outboxes_[static_cast<size_t>(transfer->peer)].sends.push_back(transfer);
    ++pending_sends_;
  } else if (!take_letter(transfer)) {
    recvs_.push_back(transfer);
    ++(transfer->peer == kAnyRank ? wanted_of_any_
                                  : inboxes_[static_cast<size_t>(transfer->peer)].wanted);
  }
}

bool Mailbox::progress() {
  bool moved = false;
  if (pending_sends_ > 0) {
    for (int64_t rank = 0; rank < group_.world(); ++rank) moved |= push(rank);
  }
  if (!recvs_.empty() || streams_ > 0) {
    for (int64_t rank = 0; rank < group_.world(); ++rank)
      if (wants(rank)) moved |= pull(rank);
  }
  return moved;
}

std::vector<TransferPtr> Mailbox::take_ended() { return std::exchange(ended_, {}); }

void Mailbox::make_outbox() {
  const int64_t stride = stride_of(capacity_);
  segment_ = Segment::create(group_.segment_kind(), stride * group_.world());
  for (int64_t rank = 0; rank < group_.world(); ++rank) {
    auto* block = new (segment_.data() + rank * stride) ByteRingBlock;
    outboxes_[static_cast<size_t>(rank)].ring = RingWriter(*block, capacity_);
  }
  RankBlock& own = group_.block(group_.rank());
  const std::string address = segment_.address().to_string();
  const size_t length = std::min(address.size(), own.outbox_address.size() - 1);
  std::memcpy(own.outbox_address.data(), address.data(), length);
  own.outbox_address[length] = '\0';
  own.outbox_state.store(OutboxState::kOpen, std::memory_order_seq_cst);
  for (int64_t rank = 0; rank < group_.world(); ++rank) ring(group_.block(rank).mail_futex);
}

// Returns false if the source has made none yet, or has gone with it: then look() reports it.
bool Mailbox::open_inbox(int64_t source) {
  RankBlock& theirs = group_.block(source);
  const auto& said = theirs.outbox_address;
  if (theirs.outbox_state.load(std::memory_order_seq_cst) == OutboxState::kNone || said[0] == '\0')
    return false;
  Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  Segment* segment = &segment_;
  const int64_t stride = stride_of(capacity_);
  if (source != group_.rank()) {
    const auto address =
        SegmentAddress::parse(std::string_view(said.data(), ::strnlen(said.data(), said.size())));
    std::string why_not = "its address is unreadable";
    if (address && address->bytes == stride * group_.world())
      inbox.segment = Segment::open(*address, why_not);
    if (!inbox.segment) {
      group_.wait_for_end(source);
      if (absence_of(source).text.empty() && !group_.failure()) {
        break_off(
            FaultKind::kMemory,
            error_text("mailbox", "cannot see what " + rank_name(source) + " sends: " + why_not,
                       group_.where(),
                       "Run the same Trireme on every rank, and look at the "
                       "limits on open files and memory."));
      }
      return false;
    }
    segment = &inbox.segment;
  }
  std::byte* place = segment->data() + group_.rank() * stride;
  inbox.ring = RingReader(*std::launder(reinterpret_cast<ByteRingBlock*>(place)), capacity_);
  ring(theirs.mail_futex);
  return true;
}

bool Mailbox::push(int64_t destination) {
  Outbox& outbox = outboxes_[static_cast<size_t>(destination)];
  bool moved = false;
  while (!outbox.sends.empty()) {
    Transfer& send = *outbox.sends.front();
    int64_t room = outbox.ring.room();
    if (outbox.ring.is_torn()) {
      report_overwritten(destination, std::to_string(room) + " bytes of room in a ring of " +
                                          std::to_string(capacity_));
      return true;
    }
    if (!outbox.streams) {
      if (room < kByteLine) break;
      const Header header{send.tag, send.memory.bytes(), ++outbox.sequence, send.dtype};
      outbox.ring.write(reinterpret_cast<const std::byte*>(&header), sizeof(header));
      outbox.streams = true;
      room -= static_cast<int64_t>(sizeof(header));
    } else if (room <= 0) {
      break;
    }
    const int64_t length = std::min({send.memory.bytes() - send.moved, room, chunk_of(capacity_)});
    send.memory.visit(send.moved, length, [&](const std::byte* memory, int64_t, int64_t bytes) {
      outbox.ring.write(memory, bytes);
    });
    send.moved += length;
    const bool complete = send.moved == send.memory.bytes();
    if (complete) outbox.ring.pad_to_line();
    outbox.ring.publish();
    ring(group_.block(destination).mail_futex);
    moved = true;
    if (!complete) continue;
    outbox.streams = false;
    --pending_sends_;
    if (!fits_ring(send) && outbox.ring.was_refused(outbox.sequence)) blame(send, destination);
    end(outbox.sends.front());
    outbox.sends.pop_front();
  }
  return moved;
}

bool Mailbox::wants(int64_t source) const {
  const Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  return inbox.streams || inbox.wanted > 0 || wanted_of_any_ > 0;
}

bool Mailbox::pull(int64_t source) {
  Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  if (!inbox.ring && !open_inbox(source)) return false;
  if (inbox.ring.is_torn()) {
    report_overwritten(source, std::to_string(inbox.ring.available()) + " bytes in a ring of " +
                                   std::to_string(capacity_));
    return true;
  }
  bool moved = false;
  for (;;) {
    if (!inbox.streams && (!wants(source) || !begin_message(source))) return moved;
    moved |= read_message(source);
    if (inbox.streams) return moved;
  }
}

// Takes the header of the next message, if it is there, and decides where the rest goes.
bool Mailbox::begin_message(int64_t source) {
  Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  Header header{};
  if (inbox.ring.available() < static_cast<int64_t>(sizeof(header))) return false;
  inbox.ring.read(reinterpret_cast<std::byte*>(&header), sizeof(header));
  if (header.sequence != ++inbox.sequence || header.bytes < 0 || element_bytes(header.dtype) == 0) {
    report_overwritten(source, "message " + std::to_string(header.sequence) + " of " +
                                   bytes_of(header.bytes, header.dtype) + ", expected message " +
                                   std::to_string(inbox.sequence));
    return false;
  }
  inbox.left = header.bytes;
  inbox.streams = true;
  ++streams_;
  const auto found = find_recv(source, header.tag);
  if (found != recvs_.end()) {
    const TransferPtr recv = *found;
    unlist(found);
    if (fits(*recv, header, source)) {
      inbox.target = recv;
    } else {
      end(recv);
    }
    return true;
  }
  try {
    const auto bytes = static_cast<size_t>(header.bytes);
    // The kernel would promise more than there is.
    if (header.bytes > kRingsOfARank && header.bytes > free_memory_bytes()) throw std::bad_alloc();
    letters_.push_back({source, header.tag, header.dtype, std::vector<std::byte>(bytes)});
  } catch (const std::bad_alloc&) {
    break_off(FaultKind::kMemory,
              error_text("mailbox",
                         "got no memory for a message of " + std::to_string(header.bytes) +
                             " bytes from " + rank_name(source) + " that nobody waits for",
                         group_.where(), "Post recvs in the order of the sends."));
    return false;
  }
  inbox.letter = std::prev(letters_.end());
  return true;
}

// Reads as much of the message as is there, and ends it with the last byte.
bool Mailbox::read_message(int64_t source) {
  Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  bool moved = false;
  do {
    const int64_t length = std::min({inbox.left, inbox.ring.available(), chunk_of(capacity_)});
    if (length <= 0 && inbox.left > 0) return moved;
    if (inbox.target) {
      Transfer& recv = *inbox.target;
      recv.memory.visit(recv.moved, length, [&](std::byte* memory, int64_t, int64_t bytes) {
        inbox.ring.read(memory, bytes);
      });
      recv.moved += length;
    } else if (inbox.letter) {
      Letter& letter = **inbox.letter;
      inbox.ring.read(letter.bytes.data() + letter.received, length);
      letter.received += length;
    } else {
      inbox.ring.read(nullptr, length);
    }
    inbox.left -= length;
    if (inbox.left == 0) inbox.ring.skip_to_line();
    inbox.ring.release();
    ring(group_.block(source).mail_futex);
    moved = true;
  } while (inbox.left > 0);
  if (inbox.target) end(std::exchange(inbox.target, nullptr));
  inbox.letter.reset();
  inbox.streams = false;
  --streams_;
  return moved;
}

// Gives a recv the message that came before it. One that is still arriving continues in the memory
// of the recv.
bool Mailbox::take_letter(const TransferPtr& recv) {
  const auto letter = std::find_if(letters_.begin(), letters_.end(), [&](const Letter& candidate) {
    return (recv->peer == kAnyRank || recv->peer == candidate.source) && recv->tag == candidate.tag;
  });
  if (letter == letters_.end()) return false;
  Inbox& inbox = inboxes_[static_cast<size_t>(letter->source)];
  const bool comes = inbox.letter == letter;
  const auto bytes = static_cast<int64_t>(letter->bytes.size());
  const uint64_t sequence = comes ? inbox.sequence : 0;
  const bool fine = fits(*recv, {letter->tag, bytes, sequence, letter->dtype}, letter->source);
  if (fine) {
    recv->memory.visit(0, letter->received, [&](std::byte* memory, int64_t offset, int64_t length) {
      std::memcpy(memory, letter->bytes.data() + offset, static_cast<size_t>(length));
    });
    recv->moved = letter->received;
  }
  if (comes) inbox.letter.reset();
  if (comes && fine) {
    inbox.target = recv;
  } else {
    end(recv);
  }
  letters_.erase(letter);
  return true;
}

std::list<TransferPtr>::iterator Mailbox::find_recv(int64_t source, int64_t tag) {
  return std::find_if(recvs_.begin(), recvs_.end(), [&](const TransferPtr& recv) {
    return (recv->peer == kAnyRank || recv->peer == source) && recv->tag == tag;
  });
}

void Mailbox::unlist(std::list<TransferPtr>::iterator recv) {
  const int64_t peer = (*recv)->peer;
  --(peer == kAnyRank ? wanted_of_any_ : inboxes_[static_cast<size_t>(peer)].wanted);
  recvs_.erase(recv);
}

// Returns whether a send fits into the ring: then it is done whether or not its destination was
// quick enough to refuse it meanwhile.
bool Mailbox::fits_ring(const Transfer& send) const {
  return static_cast<int64_t>(sizeof(Header)) + send.memory.bytes() <= capacity_;
}

// Gives its fault to a send that its destination could not use, which is known because it did not
// fit into the ring.
void Mailbox::blame(Transfer& send, int64_t destination) {
  const RingWriter& ring = outboxes_[static_cast<size_t>(destination)].ring;
  send.fault.emplace(
      FaultKind::kMismatch,
      error_text("mailbox",
                 describe(send) + " sent " + bytes_of(send.memory.bytes(), send.dtype) + ", but " +
                     rank_name(destination) + " expected " +
                     bytes_of(ring.expected_bytes(), static_cast<Dtype>(ring.expected_dtype())),
                 group_.where(), "Send what the recv there expects; this message is lost."));
}

bool Mailbox::fits(Transfer& recv, const Header& header, int64_t source) {
  recv.source = source;
  if (recv.memory.bytes() == header.bytes && recv.dtype == header.dtype) return true;
  if (header.sequence != 0) {
    inboxes_[static_cast<size_t>(source)].ring.refuse(header.sequence, recv.memory.bytes(),
                                                      static_cast<uint32_t>(recv.dtype));
  }
  recv.fault.emplace(
      FaultKind::kMismatch,
      error_text("mailbox",
                 describe(recv) + " got a message of " + bytes_of(header.bytes, header.dtype) +
                     " from " + rank_name(source) + ", expected " +
                     bytes_of(recv.memory.bytes(), recv.dtype),
                 group_.where(),
                 "Give recv a tensor of the size and dtype that is sent; this message is lost."));
  return false;
}

}  // namespace trireme::shm
