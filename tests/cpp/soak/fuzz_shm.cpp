// Whatever reads bytes that another process wrote, given any bytes: nothing may crash, read outside
// its memory or do undefined arithmetic. The first byte of an input chooses the reader. Built with
// libFuzzer where clang has it, else with the driver beside it.

#include <trireme/shm/doctor.h>
#include <trireme/shm/mailbox.h>
#include <trireme/shm/packed_tensors.h>
#include <trireme/shm/slot_channel.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <shm/fake_peer.h>
#include <soak/fuzz_target.h>
#include <span>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

namespace trireme::shm::test {
namespace {

using Bytes = std::span<const std::byte>;

// Takes numbers and texts off an input; zeros once it is used up.
class Input {
 public:
  explicit Input(Bytes bytes) : bytes_(bytes) {}

  bool is_used_up() const { return bytes_.empty(); }
  template <typename T>
  T take() {
    T value{};
    const size_t length = std::min(sizeof(T), bytes_.size());
    std::memcpy(&value, bytes_.data(), length);
    bytes_ = bytes_.subspan(length);
    return value;
  }
  // Up to the byte 0xff.
  std::string_view text() {
    const auto end = std::find(bytes_.begin(), bytes_.end(), std::byte{0xff});
    const auto length = static_cast<size_t>(end - bytes_.begin());
    const std::string_view found(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(std::min(length + 1, bytes_.size()));
    return found;
  }
  // Writes runs of (offset, length, bytes) over memory.
  void scribble(std::byte* memory, size_t size) {
    while (!is_used_up()) {
      const size_t offset = take<uint32_t>() % size;
      const size_t length = std::min<size_t>({take<uint8_t>(), size - offset, bytes_.size()});
      std::memcpy(memory + offset, bytes_.data(), length);
      bytes_ = bytes_.subspan(length);
    }
  }

 private:
  Bytes bytes_;
};

void check(bool is_true) {
  if (!is_true) std::abort();
}

void read_address(Input input) {
  const auto address = SegmentAddress::parse(input.text());
  if (address) check(SegmentAddress::parse(address->to_string()) == address);
}

void read_mapping(Input input) {
  Mapping mapping;
  parse_mapping(input.text(), sizeof(RankBlock), mapping);
}

void read_records(Input input) {
  Record mine;
  Record theirs;
  for (Record* record : {&mine, &theirs}) {
    record->fingerprint = input.take<uint64_t>();
    record->count = input.take<int64_t>();
    record->root = input.take<int32_t>();
    record->verb = input.take<Verb>();
    record->dtype = input.take<Dtype>();
    record->op = input.take<ReduceOp>();
    record->label_length = input.take<uint8_t>();
    record->label = input.take<std::array<char, 64>>();
  }
  check(!describe_mismatch(0, mine, 1, theirs).empty());
}

void look_at_blocks(Input input) {
  static std::vector<std::byte> bytes(sizeof(RankBlock));
  SeenGroup group;
  for (int32_t rank = 0; rank < 3; ++rank) {
    auto* block = new (bytes.data()) RankBlock;
    block->pid = 1;
    block->rank = rank;
    block->world = block->members = 3;
    block->state.store(RankState::kHere);
    block->records[1].sequence = 1;
    input.scribble(bytes.data(), bytes.size());
    auto seen = read_block(bytes, 1'000'000'000, input.take<int64_t>());
    if (seen) group.ranks.push_back(std::move(*seen));
  }
  if (group.ranks.empty()) return;
  judge(group, std::chrono::seconds(5));
  check(!group.verdict.empty());
}

void join_with(Input input) {
  FakePeer peer;
  const std::string_view address = input.text();
  const auto parsed = SegmentAddress::parse(address.substr(0, address.find('\n')));
  if (parsed && parsed->pid != ::getpid()) return;  // what other processes have is not ours to open
  peer.say(address, input.text());
  try {
    const auto group = peer.join();
    check(group->members().front() == 0);
  } catch (const Fault&) {
  }
}

// A message as long as the memory that is free would be taken in, for minutes and at the cost of
// every other program.
bool is_too_long_to_try(const std::byte* lines, size_t size) {
  for (size_t line = 0; line + 64 <= size; line += 64) {
    int64_t length = 0;
    std::memcpy(&length, lines + line + 8, sizeof(length));
    if (length > int64_t{1} << 24 && length < int64_t{1} << 44) return true;
  }
  return false;
}

// Messages of the peer, as they come and as nobody would send them.
void receive(Input input) {
  static FakePeer peer;
  peer.block().state.store(RankState::kHere);
  const auto group = peer.join();
  Mailbox mailbox(*group);
  std::array<int32_t, 64> memory{};
  for (int64_t i = 0; i < 3; ++i) {
    auto transfer = std::make_shared<Transfer>();
    transfer->kind = i == 2 ? Transfer::Kind::kSend : Transfer::Kind::kRecv;
    transfer->peer = 1;
    transfer->tag = i;
    transfer->dtype = Dtype::kI32;
    transfer->memory = Pieces(reinterpret_cast<std::byte*>(memory.data()), 64 * (i + 1));
    mailbox.post(transfer);
  }
  ByteRingBlock& ring = peer.open_outbox();
  std::memset(ring.bytes(), 0, 4096);
  ring.written.store(input.take<uint16_t>());
  input.scribble(reinterpret_cast<std::byte*>(&ring), sizeof(ring) + 4096);
  if (is_too_long_to_try(ring.bytes(), 4096)) return;
  for (int i = 0; i < 4 && mailbox.progress(); ++i) {
  }
  mailbox.look();
  mailbox.take_ended();
}

// Heads of a channel, and what they say of a slot of its own.
void take_messages(Input input) {
  static FakePeer peer;
  static const Segment slot = Segment::create(SegmentKind::kAnonymous, 4096);
  peer.block().state.store(RankState::kHere);
  const auto group = peer.join();
  alignas(64) static std::array<std::byte, 1024> memory;
  memory.fill(std::byte{0});
  auto* block = new (memory.data()) ChannelBlock{};
  block->sent.store(3);
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    MessageHead head;
    head.sequence = sequence;
    head.slots = 1;
    head.address = slot.address();
    head.description_bytes = input.take<int16_t>();
    head.payload_bytes = input.take<int16_t>();
    std::memcpy(memory.data() + sizeof(ChannelBlock) + (sequence - 1) * sizeof(head), &head,
                sizeof(head));
  }
  input.scribble(slot.data(), 4096);
  SlotReceiver receiver(*group, {1, memory.data(), 3});
  try {
    for (int i = 0; i < 3; ++i) {
      const SlotReceiver::Message message = receiver.take_message();
      const auto* words = reinterpret_cast<const int64_t*>(message.slot->data());
      const auto count = static_cast<size_t>(message.head.description_bytes) / 8;
      unpack({words, count}, message.head.payload_bytes);
    }
  } catch (const Fault&) {
  }
}

// Heads of any bytes. An address of another process than this is not tried.
void take_strange_messages(Input input) {
  static FakePeer peer;
  peer.block().state.store(RankState::kHere);
  const auto group = peer.join();
  alignas(64) std::array<std::byte, 1024> memory{};
  auto* block = new (memory.data()) ChannelBlock{};
  block->sent.store(1);
  MessageHead head;
  head.sequence = 1;
  std::array<std::byte, sizeof(head)> bytes{};
  std::memcpy(bytes.data(), &head, sizeof(head));
  input.scribble(bytes.data(), bytes.size());
  std::memcpy(&head, bytes.data(), sizeof(head));
  head.address.pid = ::getpid();
  head.address.kind = SegmentKind::kNamed;
  std::memcpy(memory.data() + sizeof(ChannelBlock), &head, sizeof(head));
  peer.block().state.store(RankState::kLeft);  // who cannot open its memory asks no further
  SlotReceiver receiver(*group, {1, memory.data(), 1});
  try {
    receiver.take_message();
  } catch (const Fault&) {
  }
}

// The descriptions of tensors: every element that one names lies in the payload.
void read_description(Input input) {
  const auto payload_bytes = static_cast<int64_t>(input.take<uint16_t>());
  std::vector<int64_t> words;
  while (!input.is_used_up() && words.size() < 64) {
    const auto kind = input.take<uint8_t>();
    const auto word = input.take<int64_t>();
    words.push_back(kind % 2 == 0 ? word : word % 128);
  }
  const auto tensors = unpack(words, payload_bytes);
  if (!tensors) return;
  for (const PackedTensor& tensor : *tensors) {
    int64_t numel = 1;
    for (const int64_t size : tensor.sizes) numel *= size;
    if (!tensor.is_defined || numel == 0) continue;
    check(tensor.offset >= 0 && tensor.offset + numel * tensor.element_bytes <= payload_bytes);
  }
}

using Reader = void (*)(Input);
constexpr std::array<Reader, 9> kReaders{read_address,   read_mapping,     read_records,
                                         look_at_blocks, join_with,        receive,
                                         take_messages,  read_description, take_strange_messages};

using Seed = std::vector<uint8_t>;

Seed bytes_of(uint8_t reader, std::string_view text) {
  Seed bytes{reader};
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

std::string raw(const auto&... values) {
  std::string text;
  (text.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  return text;
}

// A message of 64 bytes with its header, as scribble() takes it.
std::string message(int64_t tag, int64_t bytes, uint64_t sequence, uint8_t dtype) {
  constexpr uint32_t kBehindBlock = sizeof(ByteRingBlock);
  std::string header = raw(tag, bytes, sequence, dtype);
  return raw(uint16_t{128}, kBehindBlock, static_cast<uint8_t>(header.size())) + header;
}

}  // namespace
}  // namespace trireme::shm::test

std::vector<std::vector<uint8_t>> trireme::soak::seeds() {
  using namespace trireme::shm::test;
  using std::string;
  const string pid = std::to_string(::getpid());
  const string address = "0 " + pid + " 5 4096 0123456789abcdef fedcba9876543210";
  std::vector<Seed> found{
      bytes_of(0, address),
      bytes_of(0, "1 7 -1 9223372036854775807 0 0"),
      bytes_of(1, "7f0000000000-7f0000003000 rw-s 00000000 00:01 77   /memfd:trireme (deleted)"),
      bytes_of(4, address + "\npid:[4026531836]\n\xff"
                            "11-"),
      bytes_of(4,
               "failed 0why\xff"
               "1"),
      bytes_of(4,
               "failed 1\xff"
               "11r"),
      bytes_of(2, string(200, '\xfe')),
      bytes_of(2, raw(uint64_t{1}, int64_t{-5}, int32_t{2}, uint8_t{1}, uint8_t{200}, uint8_t{9},
                      uint8_t{255}) +
                      string(64, 'a')),
      bytes_of(5, message(0, 64, 1, 6)),
      bytes_of(5, message(0, -1, 1, 6)),
      bytes_of(5, message(9, int64_t{1} << 62, 1, 6)),
  };
  using trireme::shm::RankBlock;
  for (const uint32_t offset : {uint32_t{0}, uint32_t{256}, uint32_t(sizeof(RankBlock) - 64),
                                uint32_t(sizeof(RankBlock) - 7000)})
    found.push_back(bytes_of(3, raw(offset, uint8_t{32}) + string(32, '\xff') + raw(offset)));
  return found;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme::shm::test;
  if (size == 0) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  kReaders[data[0] % kReaders.size()](Input({bytes + 1, size - 1}));
  return 0;
}
