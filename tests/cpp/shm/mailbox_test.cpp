// Messages between ranks: order, tags, sizes, and who moves them.

#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <random>
#include <shm/post.h>

namespace trireme::mailbox_test {

using namespace trireme::shm;
using namespace trireme::shm::test;

TEST_CASE("messages of every size arrive in order") {
  const std::vector<size_t> numels = {
      0, 1, 7, 8, 9, 24, 1000, 16'384, 65'527, 65'528, 100'003, kMoreThanARing, 1'500'000};
  const int wrong = count_wrong({}, [&](ShmRank& self, Post& post) {
    int wrong = 0;
    for (int round = 0; round < 3; ++round) {
      for (const size_t numel : numels) {
        const auto seed = static_cast<int64_t>(numel) + round;
        if (self.rank == 0) post.send(values_of(seed, numel), 1);
        if (self.rank == 1) wrong += post.recv(numel, 0) != values_of(seed, numel);
      }
    }
    return wrong;
  });
  CHECK(wrong == 0);
}

TEST_CASE("both send first, of what fits into a ring, and then receive") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    const int64_t peer = 1 - self.rank;
    int wrong = 0;
    for (int round = 0; round < 200; ++round) {
      post.send(values_of(self.rank + round, 10'000), peer);
      wrong += post.recv(10'000, peer) != values_of(peer + round, 10'000);
    }
    return wrong;
  });
  CHECK(wrong == 0);
}

TEST_CASE("a recv finds its tag behind others, however large, and the others are kept in order") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    if (self.rank == 0) {
      post.send(values_of(1, kMoreThanARing), 1, 7);
      post.send(values_of(2, 5), 1, 7);
      post.send(values_of(3, kMoreThanARing), 1, 8);
      post.send(values_of(4, 1), 1, 9);
      return 0;
    }
    int wrong = 0;
    wrong += post.recv(1, 0, 9) != values_of(4, 1);
    wrong += post.recv(kMoreThanARing, 0, 8) != values_of(3, kMoreThanARing);
    wrong += post.recv(kMoreThanARing, 0, 7) != values_of(1, kMoreThanARing);
    wrong += post.recv(5, 0, 7) != values_of(2, 5);
    return wrong;
  });
  CHECK(wrong == 0);
}

TEST_CASE("a recv that is posted while its message goes to private memory gets the rest directly") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    if (self.rank == 0) {
      Values large = values_of(1, kMoreThanARing);
      const TransferPtr pending = post.start_send(large, 1, 7);
      post.recv(1, 1, 5);
      post.wait(pending);
      post.send(values_of(2, 1), 1, 9);
      return 0;
    }
    Values last(1), large(kMoreThanARing);
    const TransferPtr other_tag = post.start_recv(last, 0, 9);  // makes the large one unwanted
    for (int i = 0; i < 3; ++i) post.courier().poll();
    const TransferPtr late = post.start_recv(large, 0, 7);
    post.send(values_of(0, 1), 0, 5);
    post.wait(late);
    post.wait(other_tag);
    return (large != values_of(1, kMoreThanARing)) + (last != values_of(2, 1));
  });
  CHECK(wrong == 0);
}

TEST_CASE("posted recvs of one tag are met in their order") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    constexpr int kMessages = 50;
    std::vector<Values> memory(kMessages);
    std::vector<TransferPtr> transfers;
    for (int i = 0; i < kMessages; ++i) {
      const size_t numel = static_cast<size_t>(i % 5) * 20'000;
      auto& values = memory[static_cast<size_t>(i)];
      values = self.rank == 0 ? values_of(i, numel) : Values(numel);
      transfers.push_back(self.rank == 0 ? post.start_send(values, 1) : post.start_recv(values, 0));
    }
    int wrong = 0;
    for (int i = kMessages - 1; i >= 0; --i) {  // waited for in the opposite order
      const auto place = static_cast<size_t>(i);
      post.wait(transfers[place]);
      wrong += memory[place] != values_of(i, memory[place].size());
    }
    return wrong;
  });
  CHECK(wrong == 0);
}

TEST_CASE("a recv from any rank says who sent, and each message comes once") {
  const int wrong = count_wrong({.world = 4}, [](ShmRank& self, Post& post) {
    constexpr int kEach = 20;
    if (self.rank != 0) {
      for (int i = 0; i < kEach; ++i) post.send(values_of(self.rank * 100 + i, 30'000), 0, 3);
      return 0;
    }
    int wrong = 0;
    std::vector<int> seen(4);
    for (int i = 0; i < 3 * kEach; ++i) {
      Values values(30'000);
      const TransferPtr recv = post.start_recv(values, kAnyRank, 3);
      post.wait(recv);
      const auto source = static_cast<size_t>(recv->source);
      wrong += source < 1 || source > 3;
      wrong += values != values_of(recv->source * 100 + seen[source % 4]++, 30'000);
    }
    return wrong + (seen != std::vector<int>{0, kEach, kEach, kEach});
  });
  CHECK(wrong == 0);
}

TEST_CASE("a rank sends to itself, also more than its ring holds") {
  const int wrong = count_wrong({.world = 1}, [](ShmRank&, Post& post) {
    post.send(values_of(1, 10), 0);
    int wrong = post.recv(10, 0) != values_of(1, 10);
    Values large = values_of(2, kMoreThanARing);
    const TransferPtr sending = post.start_send(large, 0);
    wrong += post.recv(kMoreThanARing, kAnyRank) != values_of(2, kMoreThanARing);
    post.wait(sending);
    return wrong;
  });
  CHECK(wrong == 0);
}

TEST_CASE("collectives and messages at once, from two threads of each rank") {
  const int wrong = count_wrong({.world = 3}, [](ShmRank& self, Post& post) {
    int wrong_sums = 0;
    std::thread collectives([&] {
      for (int i = 0; i < 200; ++i) {
        std::vector<float> values(i % 10 == 0 ? 100'000 : 10, 1);
        self.collectives.all_reduce(pieces_of(values), {}, {});
        wrong_sums += values.back() != 3;
      }
    });
    int wrong = 0;
    const int64_t next = (self.rank + 1) % 3, previous = (self.rank + 2) % 3;
    for (int i = 0; i < 200; ++i) {
      const size_t numel = i % 10 == 0 ? 100'000 : 10;
      Values sent = values_of(self.rank + i, numel), got(numel);
      const TransferPtr sending = post.start_send(sent, next),
                        coming = post.start_recv(got, previous);
      post.wait(sending);
      post.wait(coming);
      wrong += got != values_of(previous + i, numel);
    }
    collectives.join();
    return wrong + wrong_sums;
  });
  CHECK(wrong == 0);
}

TEST_CASE("several threads of a rank send and receive") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int64_t tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 50; ++i) {
          const size_t numel = i % 10 == 0 ? 100'000 : 10;
          if ((self.rank + tag) % 2 == 0)
            post.send(values_of(tag + i, numel), 1 - self.rank, tag);
          else
            wrong += post.recv(numel, 1 - self.rank, tag) != values_of(tag + i, numel);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return wrong.load();
  });
  CHECK(wrong == 0);
}

TEST_CASE("what nobody waits for moves by itself") {
  std::atomic<bool> received{false};
  const int wrong = count_wrong({}, [&](ShmRank& self, Post& post) {
    Values values = self.rank == 0 ? values_of(1, kMoreThanARing) : Values(kMoreThanARing);
    if (self.rank == 0) {
      const TransferPtr sending = post.start_send(values, 1);
      until([&] { return sending->is_done() && received; });
      return 0;
    }
    const TransferPtr coming = post.start_recv(values, 0);
    until([&] { return coming->is_done(); });
    received = true;
    return static_cast<int>(values != values_of(1, kMoreThanARing));
  });
  CHECK(wrong == 0);
}

TEST_CASE("messages of random sizes, tags and order between all ranks") {
  for (const int64_t world : {2, 3, 5}) {
    const int wrong = count_wrong({.world = world}, [&](ShmRank& self, Post& post) {
      std::mt19937 random(static_cast<unsigned>(world));  // all ranks have the same
      struct Message {
        TransferPtr transfer;
        Values values;
        int64_t seed;
        bool coming;
      };
      std::deque<Message> all;
      int wrong = 0;
      const auto finish = [&] {
        std::mt19937 order(static_cast<unsigned>(self.rank));
        std::vector<Message*> some;
        for (Message& message : all) some.push_back(&message);
        std::shuffle(some.begin(), some.end(), order);
        for (Message* message : some) {
          post.wait(message->transfer);
          if (message->coming)
            wrong += message->values != values_of(message->seed, message->values.size());
        }
        all.clear();
      };
      for (int64_t i = 0; i < 400; ++i) {
        const auto source = static_cast<int64_t>(random() % static_cast<unsigned>(world));
        const auto target = static_cast<int64_t>(random() % static_cast<unsigned>(world));
        const auto tag = static_cast<int64_t>(random() % 3);
        const size_t numel = random() % (i % 20 == 0 ? 200'000 : i % 3 == 0 ? 20'000 : 50);
        if (self.rank == source) {
          Message& message = all.emplace_back(Message{nullptr, values_of(i, numel), i, false});
          message.transfer = post.start_send(message.values, target, tag);
        }
        if (self.rank == target) {
          Message& message = all.emplace_back(Message{nullptr, Values(numel), i, true});
          message.transfer = post.start_recv(message.values, source, tag);
        }
        if (i % 100 == 99) finish();
      }
      return wrong;
    });
    CHECK(wrong == 0);
  }
}

}  // namespace trireme::mailbox_test
