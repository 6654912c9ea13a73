// Channels of slots between two ranks of a host, and what describes their tensors.

#include <trireme/shm/slot_channel.h>

#include <trireme/shm/packed_tensors.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <random>
#include <shm/fake_peer.h>
#include <shm/two_processes.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace trireme::slot_channel_test {

using namespace trireme::shm;
using namespace trireme::shm::test;

namespace {

// Makes memory of a channel that all ranks map.
Segment memory_of(ShmRank& self, int64_t messages) {
  return self.collectives.share_segment(channel_bytes(messages), {}).segment;
}

void send(SlotSender& sender, int64_t number, int64_t bytes, std::string_view context = "room") {
  if (sender.is_full()) sender.wait(context);
  MessageHead head;
  head.step = 1;
  head.micro_batch = number;
  head.payload_bytes = bytes;
  std::memset(sender.slot_for(head.bytes()), static_cast<int>(number), static_cast<size_t>(bytes));
  sender.send(head);
}

SlotReceiver::Message receive(SlotReceiver& receiver) {
  if (receiver.is_empty()) receiver.wait("a message");
  return receiver.take_message();
}

// While it lives, this process opens no further file.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit now = before_;
    const int next = ::dup(0);
    ::close(next);
    // The numbers below it are taken.
    now.rlim_cur = static_cast<rlim_t>(next);
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  ~NoMoreFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoMoreFiles(const NoMoreFiles&) = delete;
  NoMoreFiles& operator=(const NoMoreFiles&) = delete;

 private:
  rlimit before_{};
};

bool has_come(const SlotReceiver::Message& message, int64_t number) {
  const std::byte* data = message.slot->data() + message.head.payload_begin();
  for (int64_t i = 0; i < message.head.payload_bytes; ++i)
    if (data[i] != static_cast<std::byte>(number)) return false;
  return message.head.micro_batch == number;
}

}  // namespace

TEST_CASE("messages of any size come as they were sent, and let go in any order by any thread") {
  for (const int64_t messages : {1, 2, 5}) {
    int wrong = 0;
    int64_t most = 0;
    run_shm_ranks({.world = 2}, [&](ShmRank& self) {
      const Segment memory = memory_of(self, messages);
      const ChannelEnd end{1 - self.rank, memory.data(), messages};
      std::mt19937 sizes(5);
      if (self.rank == 0) {
        SlotSender sender(self.group, end);
        for (int64_t i = 0; i < 400; ++i) {
          send(sender, i, static_cast<int64_t>(sizes() % (i % 50 == 0 ? 200'000 : 600)));
          most = std::max(most, sender.slots());
        }
        self.collectives.barrier({});
        return;
      }
      SlotReceiver receiver(self.group, end);
      std::mt19937 random(7);
      std::vector<std::pair<int64_t, SlotReceiver::Message>> kept;
      for (int64_t i = 0; i < 400; ++i) {
        kept.emplace_back(i, receive(receiver));
        receiver.done_with_one();
        if (kept.size() < 8) continue;
        const auto last = kept.begin() + static_cast<int64_t>(random() % kept.size());
        wrong += !has_come(last->second, last->first);
        std::thread([&] { last->second.slot.reset(); }).join();
        kept.erase(last);
      }
      self.collectives.barrier({});
    });
    CHECK(wrong == 0);
    CHECK(most <= 8 + messages);
  }
}

TEST_CASE("a slot is used again, a small one is replaced, and those of too many go") {
  std::vector<int64_t> slots;
  run_shm_ranks({.world = 2}, [&](ShmRank& self) {
    const Segment memory = memory_of(self, 2);
    const ChannelEnd end{1 - self.rank, memory.data(), 2};
    SlotSender sender(self.group, end);
    SlotReceiver receiver(self.group, end);
    std::vector<SlotReceiver::Message> kept;
    const auto cross = [&](int64_t count, int64_t bytes, bool keeps) {
      for (int64_t i = 0; i < count; ++i) {
        if (self.rank == 0) {
          send(sender, i, bytes);
        } else {
          SlotReceiver::Message message = receive(receiver);
          receiver.done_with_one();
          if (keeps) kept.push_back(std::move(message));
        }
        self.collectives.barrier({});
      }
      if (self.rank == 0) slots.push_back(sender.slots());
    };
    cross(5, 100, false);
    cross(5, 100'000, false);
    cross(9, 100, true);
    kept.clear();
    self.collectives.barrier({});
    cross(2, 100, false);
  });
  CHECK(slots == std::vector<int64_t>{1, 1, 9, 2});
}

TEST_CASE("what is kept beyond what is lent was copied, and its slots are used again") {
  const LentMemory most = most_lent(SegmentKind::kAnonymous, 1);
  CHECK(most.slots >= 4);
  CHECK(most_lent(SegmentKind::kAnonymous, 1 << 20).slots == 4);
  CHECK(most_lent(SegmentKind::kNamed, 1).bytes <= most.bytes);
  const int64_t count = most.slots + 20;
  int64_t slots = 0;
  int64_t again = 0;
  int wrong = 0;
  run_shm_ranks({.world = 2}, [&](ShmRank& self) {
    const Segment memory = memory_of(self, 1);
    const ChannelEnd end{1 - self.rank, memory.data(), 1};
    if (self.rank == 0) {
      SlotSender sender(self.group, end);
      for (int64_t i = 0; i < count; ++i) send(sender, i, 5000 + i);
      slots = sender.slots();
      self.collectives.barrier({});
      self.collectives.barrier({});
      for (int64_t i = 0; i < 3; ++i) send(sender, i, 5000);
      again = sender.slots();
      self.collectives.barrier({});
      return;
    }
    SlotReceiver receiver(self.group, end);
    std::vector<SlotReceiver::Message> kept;
    for (int64_t i = 0; i < count; ++i) {
      kept.push_back(receive(receiver));
      receiver.done_with_one();
    }
    self.collectives.barrier({});
    for (int64_t i = 0; i < count; ++i) wrong += !has_come(kept[static_cast<size_t>(i)], i);
    kept.clear();
    self.collectives.barrier({});
    for (int64_t i = 0; i < 3; ++i) {
      wrong += !has_come(receive(receiver), i);
      receiver.done_with_one();
    }
    self.collectives.barrier({});
  });
  CHECK(wrong == 0);
  CHECK(slots <= most.slots + 2);
  CHECK(again <= 2);
}

TEST_CASE("where there is no file for a slot, what is small goes by the reserve") {
  std::string said;
  std::string refused;
  bool full_meanwhile = false;
  bool room_again = false;
  int wrong = 0;
  int64_t came = 0;
  run_shm_ranks({.world = 2}, [&](ShmRank& self) {
    constexpr int64_t kReserve = 8192;
    const Segment memory = self.collectives.share_segment(channel_bytes(4, kReserve), {}).segment;
    const ChannelEnd end{1 - self.rank, memory.data(), 4, true, kReserve};
    SlotSender sender(self.group, end);
    SlotReceiver receiver(self.group, end);
    SlotReceiver::Message kept;
    if (self.rank == 1) {
      self.collectives.barrier({});
      kept = receive(receiver);
      receiver.done_with_one();
      self.collectives.barrier({});
      self.collectives.barrier({});
      std::vector<SlotReceiver::Message> small;
      for (int64_t i = 1; i < 5; ++i) {
        small.push_back(receive(receiver));
        receiver.done_with_one();
      }
      wrong += !has_come(kept, 0);
      for (int64_t i = 1; i < 5; ++i) wrong += !has_come(small[static_cast<size_t>(i - 1)], i);
      came = static_cast<int64_t>(small.size());
      self.collectives.barrier({});
      return;
    }
    send(sender, 0, 100'000);
    self.collectives.barrier({});
    self.collectives.barrier({});
    const NoMoreFiles no_more;
    said = failure_of([&] { sender.slot_for(50'000); }).text;
    room_again = !sender.is_full();
    send(sender, 1, 5000);
    refused = failure_of([&] { sender.slot_for(5000); }).text;
    full_meanwhile = sender.is_full();
    self.collectives.barrier({});
    for (int64_t i = 2; i < 5; ++i) {
      while (!sender.is_drained()) std::this_thread::yield();  // the reserve is free then
      send(sender, i, 5000);
    }
    self.collectives.barrier({});
  });
  INFO(said);
  CHECK(contains(said, "Too many open files: the limit of this process is "));
  CHECK(contains(said, "ulimit -n"));
  CHECK(room_again);
  CHECK(contains(refused, "Too many open files"));
  CHECK(full_meanwhile);
  CHECK(wrong == 0);
  CHECK(came == 4);
}

TEST_CASE("a slot is mapped though other threads take each file that becomes free for a moment") {
  const Segment slot = Segment::create(SegmentKind::kAnonymous, 4096);
  std::string why_not;
  int mapped = 0;
  int taken = 0;
  std::atomic<bool> reads{false};
  std::atomic<bool> is_over{false};
  std::thread reader([&] {  // starts while there are files, which sanitizers need for that
    while (!is_over) {
      const int file = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
      taken += file >= 0;
      if (file >= 0) ::close(file);
      reads = true;
    }
  });
  while (!reads) std::this_thread::yield();
  {
    const NoMoreFiles no_more;
    for (int i = 0; i < 300; ++i)
      mapped += static_cast<bool>(Segment::open(slot.address(), why_not));
  }
  is_over = true;
  reader.join();
  INFO(why_not << "; the other thread took " << taken);
  CHECK(mapped == 300);
}

TEST_CASE("what earlier steps sent is forgotten, and its slots are free") {
  bool is_empty = false;
  bool has_room = false;
  bool fine = false;
  int64_t slots = 0;
  run_shm_ranks({.world = 2}, [&](ShmRank& self) {
    const Segment memory = memory_of(self, 3);
    const ChannelEnd end{1 - self.rank, memory.data(), 3};
    SlotSender sender(self.group, end);
    SlotReceiver receiver(self.group, end);
    if (self.rank == 0)
      for (int64_t i = 0; i < 3; ++i) send(sender, i, 100);
    self.collectives.barrier({});
    if (self.rank == 1) {
      receive(receiver);  // it is never done with this
      receiver.forget_before(2);
      is_empty = receiver.is_empty();
    }
    self.collectives.barrier({});
    if (self.rank == 0) {
      has_room = !sender.is_full();
      for (int64_t i = 0; i < 3; ++i) send(sender, i, 100);
      slots = sender.slots();
    }
    self.collectives.barrier({});
    if (self.rank == 1) fine = has_come(receive(receiver), 0);
    self.collectives.barrier({});
  });
  CHECK(is_empty);
  CHECK(has_room);
  CHECK(fine);
  CHECK(slots == 3);
}

TEST_CASE("who waits hears of another rank's failure, and of none after the group went on") {
  std::vector<std::string> said(2);
  bool fine = false;
  run_shm_ranks({.world = 2}, [&](ShmRank& self) {
    const Segment memory = memory_of(self, 1);
    const ChannelEnd end{1 - self.rank, memory.data(), 1};
    SlotSender sender(self.group, end);
    SlotReceiver receiver(self.group, end);
    if (self.rank == 0) {
      said[0] = failure_of([&] {
                  for (int64_t i = 0; i < 2; ++i) send(sender, i, 10, "room for 0F1");
                }).text;
    } else {
      until_asleep(self.group, 0);
      self.group.abandon("the coffee is cold");
      said[1] = failure_of([&] { receive(receiver); }).text;
    }
    self.collectives.barrier({});
    if (self.rank == 1) receiver.forget_before(2);
    self.collectives.barrier({});
    if (self.rank == 0) send(sender, 5, 10);
    if (self.rank == 1) fine = has_come(receive(receiver), 5);
    self.collectives.barrier({});
  });
  CHECK(contains(said[0], "room for 0F1"));
  for (const std::string& text : said) CHECK(contains(text, "the coffee is cold"));
  CHECK(fine);
}

TEST_CASE("a process that dies between messages is named to the one that waits for it") {
  std::string said;
  run_two_processes(
      [&](ShmRank& self) {
        const Segment memory = memory_of(self, 2);
        SlotSender sender(self.group, {0, memory.data(), 2});
        send(sender, 0, 5000);
        self.collectives.barrier({});
        ::kill(::getpid(), SIGKILL);
      },
      [&](ShmRank& self, pid_t) {
        const Segment memory = memory_of(self, 2);
        SlotReceiver receiver(self.group, {1, memory.data(), 2});
        const SlotReceiver::Message message = receive(receiver);
        self.collectives.barrier({});
        said = failure_of([&] { receive(receiver); }).text;
        if (!has_come(message, 0)) said += "; what was received is gone";
      });
  INFO(said);
  CHECK(contains(said, "a message: rank 1 (process "));
  CHECK(contains(said, "has died"));
  CHECK_FALSE(contains(said, "is gone"));
}

TEST_CASE("a message that goes with the process that sent it is an error with its name") {
  std::string said;
  run_two_processes(
      [&](ShmRank& self) {
        const Segment memory = memory_of(self, 2);
        SlotSender sender(self.group, {0, memory.data(), 2});
        send(sender, 0, 5000);
        ::kill(::getpid(), SIGKILL);
      },
      [&](ShmRank& self, pid_t pid) {
        const Segment memory = memory_of(self, 2);
        SlotReceiver receiver(self.group, {1, memory.data(), 2});
        receiver.wait("a message");
        ::waitid(P_PID, static_cast<id_t>(pid), nullptr, WEXITED | WNOWAIT);
        said = failure_of([&] { receive(receiver); }).text;
      });
  INFO(said);
  CHECK(contains(said, "the message is lost: rank 1 (process "));
}

TEST_CASE("a head that nobody can have sent fails the group") {
  const Segment slot = Segment::create(SegmentKind::kAnonymous, 4096);
  for (const int broken : {0, 1, 2, 3, 4, 5}) {
    FakePeer peer;
    const auto group = peer.join();
    alignas(64) std::array<std::byte, 1024> memory{};
    auto* block = new (memory.data()) ChannelBlock{};
    MessageHead head;
    head.sequence = 1;
    head.slots = 1;
    head.payload_bytes = 4000;
    head.address = slot.address();
    if (broken == 1) head.sequence = 2;
    if (broken == 2) head.slot = 1;
    if (broken == 3) head.payload_bytes = 4096;
    if (broken == 4) head.text_bytes = -1;
    if (broken == 5) head.description_bytes = std::numeric_limits<int64_t>::max();
    std::memcpy(memory.data() + sizeof(ChannelBlock), &head, sizeof(head));
    block->sent.store(1);
    SlotReceiver receiver(*group, {1, memory.data(), 1});
    const Failure failure = failure_of([&] { receiver.take_message(); });
    INFO(broken << ": " << failure.text);
    CHECK(contains(failure.text, broken == 0 ? "no fault" : "its memory was overwritten"));
    CHECK(group->failure().has_value() == (broken != 0));
  }
}

TEST_CASE("a description is read as it was written, and any other is none") {
  TensorPacker packer;
  PackedTensor tensor{.is_defined = true, .requires_grad = true, .dtype = 6, .element_bytes = 4};
  tensor.sizes = {2, 3};
  tensor.strides = {1, 2};
  CHECK(packer.add(tensor) == 0);
  packer.add({});
  CHECK(packer.add(tensor) == 64);
  CHECK(packer.payload_bytes() == 88);
  const auto found = unpack(packer.description(), packer.payload_bytes());
  REQUIRE(found);
  REQUIRE(found->size() == 3);
  CHECK_FALSE((*found)[1].is_defined);
  CHECK((*found)[2].offset == 64);
  CHECK((*found)[2].sizes == tensor.sizes);
  CHECK((*found)[2].strides == tensor.strides);
  CHECK((*found)[2].requires_grad);

  CHECK_FALSE(unpack(packer.description(), packer.payload_bytes() - 1));
  for (size_t cut = 1; cut < 6; ++cut)
    CHECK_FALSE(unpack(std::span(packer.description()).first(cut), 88));
  const auto with = [&](size_t word, int64_t value) {
    std::vector<int64_t> words = packer.description();
    words[word] = value;
    return unpack(words, 88).has_value();
  };
  CHECK(with(1, 0));
  for (const int64_t wrong : {int64_t{-1}, int64_t{1} << 62, std::numeric_limits<int64_t>::min()})
    for (const size_t word : {1, 2, 3, 4, 5}) CHECK_FALSE(with(word, wrong));
  CHECK_FALSE(with(4, 7));  // a stride that leaves gaps
  CHECK_FALSE(with(1, 4));  // not aligned
}

}  // namespace trireme::slot_channel_test
