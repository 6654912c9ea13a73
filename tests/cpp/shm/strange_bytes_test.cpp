// A peer whose memory or words are not what they should be: an error, never a crash. What fuzzing
// found is here, one case each.

#include <trireme/shm/courier.h>

#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <limits>
#include <shm/fake_peer.h>
#include <shm/two_processes.h>

namespace trireme::strange_bytes_test {

using namespace trireme::shm;
using namespace trireme::shm::test;

namespace {

struct Message {
  int64_t tag = 0;
  int64_t bytes = 8;
  uint64_t sequence = 1;
  Dtype dtype = Dtype::kI32;
};

// What a recv of eight bytes with tag 0 says after the peer has left that in its ring.
std::string outcome_of(const Message& message, uint64_t written = 64) {
  FakePeer peer;
  const auto group = peer.join();
  ByteRingBlock& ring = peer.open_outbox();
  std::memcpy(ring.bytes(), &message, sizeof(message));
  ring.written.store(written);
  Courier courier(*group);
  std::array<int32_t, 2> memory{};
  auto recv = std::make_shared<Transfer>();
  recv->kind = Transfer::Kind::kRecv;
  recv->peer = 1;
  recv->dtype = Dtype::kI32;
  recv->memory = Pieces(reinterpret_cast<std::byte*>(memory.data()), sizeof(memory));
  courier.post(recv);
  courier.wait(*recv);
  return recv->fault ? recv->fault->what() : "fine";
}

}  // namespace

TEST_CASE("a message that nobody can have sent fails the group") {
  CHECK(outcome_of({}) == "fine");
  for (const Message& message : {Message{.sequence = 2}, Message{.bytes = -1},
                                 Message{.bytes = std::numeric_limits<int64_t>::min()},
                                 Message{.dtype = static_cast<Dtype>(200)}}) {
    const std::string text = outcome_of(message);
    INFO(text);
    CHECK(
        contains(text, "expected message 1, from rank 1: its memory was overwritten (rank 0 of "));
  }
  for (const uint64_t written : {uint64_t{1} << 20, ~uint64_t{0}}) {
    const std::string text = outcome_of({}, written);
    INFO(text);
    CHECK(contains(text, "bytes in a ring of 262144, from rank 1: its memory was overwritten"));
  }
}

TEST_CASE("a message longer than the memory is refused before memory is taken") {
  for (const int64_t bytes : {int64_t{1} << 45, std::numeric_limits<int64_t>::max()}) {
    const std::string text = outcome_of({.tag = 9, .bytes = bytes});
    INFO(text);
    CHECK(contains(text, "got no memory for a message of " + std::to_string(bytes) + " bytes"));
  }
}

TEST_CASE("a reader that claims to have read what was not written fails the group") {
  FakePeer peer;
  const auto group = peer.join();
  Mailbox mailbox(*group);
  std::array<int32_t, 2> memory{};
  const auto send = [&] {
    auto transfer = std::make_shared<Transfer>();
    transfer->peer = 1;
    transfer->memory = Pieces(reinterpret_cast<std::byte*>(memory.data()), sizeof(memory));
    mailbox.post(transfer);
    mailbox.progress();
    return transfer;
  };
  const TransferPtr first = send();
  CHECK_FALSE(first->fault);
  std::string why_not;
  const auto address = SegmentAddress::parse(group->block(0).outbox_address.data());
  REQUIRE(address);
  const Segment mine = Segment::open(*address, why_not);
  REQUIRE(mine);
  const auto to_peer = static_cast<size_t>(mine.bytes() / 2);
  reinterpret_cast<ByteRingBlock*>(mine.data() + to_peer)->consumed.store(1 << 20);
  const TransferPtr second = send();
  REQUIRE(second->fault);
  CHECK(contains(second->fault->what(), "bytes of room in a ring of 262144, from rank 1"));
}

TEST_CASE("an address of as many bytes as there are numbers is none") {
  const std::string most = std::to_string(std::numeric_limits<int64_t>::max());
  CHECK_FALSE(SegmentAddress::parse("0 1 2 " + most + " 0 0"));
}

TEST_CASE("a peer whose first segment has another size is not mapped") {
  const Segment other = Segment::create(SegmentKind::kAnonymous, 64);
  FakePeer peer;
  peer.say(other.address().to_string() + "\n" + pid_namespace() + "\n", "11-");
  const auto group = peer.join();
  CHECK(group->members() == std::vector<int64_t>{0});
  CHECK(group->why_alone() == "rank 1 runs another Trireme");
}

TEST_CASE("a peer that leaves no address for its ring is an error with its number") {
  FakePeer peer;
  for (auto* counter : {&peer.block().entered, &peer.block().ring_made, &peer.block().rings_mapped})
    counter->store(uint64_t{1} << 60);
  for (const char* address : {"", "0 1 2 64 0 0"}) {
    std::strcpy(peer.block().ring_address.data(), address);
    const auto group = peer.join();
    const Failure failure = failure_of([&] {
      group->begin({.verb = Verb::kBarrier}, {});
      group->make_rings();
    });
    INFO(failure.text);
    CHECK(failure.kind == FaultKind::kMemory);
    CHECK(contains(failure.text, "rank 1 left no address of "));
  }
}

}  // namespace trireme::strange_bytes_test
