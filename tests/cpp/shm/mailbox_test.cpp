// Messages between ranks: order, tags, sizes, who comes first, and what goes wrong.

#include <trireme/shm/courier.h>

#include <catch2/catch.hpp>
#include <random>
#include <shm/two_processes.h>

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

using Values = std::vector<int32_t>;
constexpr size_t kMoreThanARing = 300'000;  // elements

Values values_of(int64_t seed, size_t numel) {
  Values values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<int32_t>(seed * 7919 + int64_t(i) * 3);
  return values;
}

// A rank's messages, in words that a test can be read in.
class Post {
 public:
  explicit Post(ShmRank& self) : courier_(self.group) {}

  TransferPtr start_send(Values& values, int64_t to, int64_t tag = 0, milliseconds timeout = {}) {
    return start(Transfer::Kind::kSend, values, to, tag, timeout);
  }
  TransferPtr start_recv(Values& values, int64_t from, int64_t tag = 0, milliseconds timeout = {}) {
    return start(Transfer::Kind::kRecv, values, from, tag, timeout);
  }
  void wait(const TransferPtr& transfer) {
    courier_.wait(*transfer);
    if (transfer->fault) throw *transfer->fault;
  }
  void send(Values values, int64_t to, int64_t tag = 0, milliseconds timeout = {}) {
    wait(start_send(values, to, tag, timeout));
  }
  Values recv(size_t numel, int64_t from, int64_t tag = 0, milliseconds timeout = {}) {
    Values values(numel, -1);
    wait(start_recv(values, from, tag, timeout));
    return values;
  }
  Courier& courier() { return courier_; }

 private:
  TransferPtr start(Transfer::Kind kind, Values& values, int64_t peer, int64_t tag,
                    milliseconds timeout) {
    auto transfer = std::make_shared<Transfer>();
    transfer->kind = kind;
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->memory = pieces_of(values);
    transfer->dtype = Dtype::kI32;
    transfer->timeout = timeout;
    courier_.post(transfer);
    return transfer;
  }

  Courier courier_;
};

// Runs the ranks and counts what they found wrong.
int count_wrong(const ShmRun& run, const std::function<int(ShmRank&, Post&)>& rank_main) {
  std::atomic<int> wrong{0};
  run_shm_ranks(run, [&](ShmRank& self) {
    Post post(self);
    wrong += rank_main(self, post);
  });
  return wrong;
}

}  // namespace

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
      const auto at = static_cast<size_t>(i);
      post.wait(transfers[at]);
      wrong += memory[at] != values_of(i, memory[at].size());
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

TEST_CASE("another size or dtype than sent: the recv raises, and the next one works") {
  std::vector<Failure> failures(3);
  std::vector<int> right(2);
  const auto fail = [&](Post& post, size_t numel, int64_t tag) {
    return failure_of([&] { post.recv(numel, 0, tag); });
  };
  run_shm_ranks({}, [&](ShmRank& self) {
    Post post(self);
    if (self.rank == 0) {
      post.send(values_of(1, 10), 1, 3);
      post.send(values_of(2, kMoreThanARing), 1, 3);
      post.send(values_of(3, 4), 1, 3);
      post.send(values_of(4, 6), 1, 4);
      post.send(values_of(5, 1), 1, 5);
      return;
    }
    failures[0] = fail(post, 4, 3);
    failures[1] = fail(post, 4, 3);
    right[0] = post.recv(4, 0, 3) == values_of(3, 4);
    post.recv(1, 0, 5);  // the one with tag 4 is in private memory now
    failures[2] = fail(post, 7, 4);
    std::vector<float> one(1, 1);
    right[1] = !self.group.failure();
  });
  CHECK(right == std::vector<int>{1, 1});
  for (const Failure& failure : failures) CHECK(failure.kind == FaultKind::kMismatch);
  CHECK(failures[0].text ==
        "[mailbox] recv of 4 int32 from rank 0 with tag 3 got a message of 40 bytes of int32 from "
        "rank 0, expected 16 bytes of int32 (rank 1 of 2). Give recv a tensor of the size and "
        "dtype that is sent; this message is lost.");
  CHECK(contains(failures[1].text, "got a message of 1200000 bytes"));
  CHECK(contains(failures[2].text, "with tag 4 got a message of 24 bytes"));
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
      while (!sending->is_done()) ::usleep(1000);
      while (!received) ::usleep(1000);
      return 0;
    }
    const TransferPtr coming = post.start_recv(values, 0);
    while (!coming->is_done()) ::usleep(1000);
    received = true;
    return static_cast<int>(values != values_of(1, kMoreThanARing));
  });
  CHECK(wrong == 0);
}

TEST_CASE("messages of random sizes, tags and order between all ranks") {
  for (const int64_t world : {2, 3, 5}) {
    const int wrong = count_wrong({.world = world}, [&](ShmRank& self, Post& post) {
      std::mt19937 random(static_cast<unsigned>(world));  // the same on all ranks
      struct One {
        TransferPtr transfer;
        Values values;
        int64_t seed;
        bool coming;
      };
      std::deque<One> all;
      int wrong = 0;
      const auto finish = [&] {
        std::mt19937 order(static_cast<unsigned>(self.rank));
        std::vector<One*> some;
        for (One& one : all) some.push_back(&one);
        std::shuffle(some.begin(), some.end(), order);
        for (One* one : some) {
          post.wait(one->transfer);
          if (one->coming) wrong += one->values != values_of(one->seed, one->values.size());
        }
        all.clear();
      };
      for (int64_t i = 0; i < 400; ++i) {
        const auto source = static_cast<int64_t>(random() % static_cast<unsigned>(world));
        const auto target = static_cast<int64_t>(random() % static_cast<unsigned>(world));
        const auto tag = static_cast<int64_t>(random() % 3);
        const size_t numel = random() % (i % 20 == 0 ? 200'000 : i % 3 == 0 ? 20'000 : 50);
        if (self.rank == source) {
          One& one = all.emplace_back(One{nullptr, values_of(i, numel), i, false});
          one.transfer = post.start_send(one.values, target, tag);
        }
        if (self.rank == target) {
          One& one = all.emplace_back(One{nullptr, Values(numel), i, true});
          one.transfer = post.start_recv(one.values, source, tag);
        }
        if (i % 100 == 99) finish();
      }
      return wrong;
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("a rank that does not send in time ends the group, and all hear of it") {
  std::vector<Failure> failures(2);
  run_shm_ranks({}, [&](ShmRank& self) {
    Post post(self);
    const auto own = static_cast<size_t>(self.rank);
    if (self.rank == 0) {
      failures[own] = failure_of([&] { post.recv(4, 1, 3, milliseconds(200)); });
    } else {
      failures[own] = failure_of([&] { post.recv(4, kAnyRank); });
    }
  });
  CHECK(failures[0].kind == FaultKind::kTimeout);
  CHECK(contains(failures[0].text, "recv of 4 int32 from rank 1 with tag 3: rank 1 (process "));
  CHECK(contains(failures[0].text, "has not sent within 200 ms; it is alive"));
  CHECK(failures[1].kind == FaultKind::kAborted);
  CHECK(contains(failures[1].text, "rank 0 says: [mailbox] recv of 4 int32"));
}

TEST_CASE("a large send that nobody receives names who should") {
  std::vector<Failure> failures(2);
  run_shm_ranks({}, [&](ShmRank& self) {
    Post post(self);
    if (self.rank == 0) {
      failures[0] = failure_of([&] { post.send(Values(kMoreThanARing), 1, 3, milliseconds(200)); });
    } else {
      while (!self.group.failure()) ::usleep(1000);
      failures[1] = failure_of([&] { post.send(Values(1), 0); });
    }
  });
  CHECK(failures[0].kind == FaultKind::kTimeout);
  CHECK(contains(failures[0].text, "send of 300000 int32 to rank 1 with tag 3: rank 1 (process "));
  CHECK(contains(failures[0].text, "has not received within 200 ms"));
  CHECK(failures[1].kind == FaultKind::kAborted);
}

TEST_CASE("a wait with a time of its own returns, and the transfer goes on") {
  const int wrong = count_wrong({}, [](ShmRank& self, Post& post) {
    Values values(4);
    if (self.rank == 0) {
      const TransferPtr coming = post.start_recv(values, 1);
      int wrong = post.courier().wait(*coming, Clock::now() + milliseconds(20));
      post.send(values_of(1, 1), 1);
      post.wait(coming);
      return wrong + (values != values_of(2, 4));
    }
    post.recv(1, 0);
    post.send(values_of(2, 4), 0);
    return 0;
  });
  CHECK(wrong == 0);
}

TEST_CASE("what a rank sent before it left arrives; what it did not send is missed") {
  std::vector<Failure> failures(2);
  const int wrong = count_wrong({.world = 3}, [&](ShmRank& self, Post& post) {
    if (self.rank == 1) {
      post.send(values_of(1, 100), 0);
      return 0;
    }
    if (self.rank == 2) return 0;
    ::usleep(100'000);
    const int wrong = post.recv(100, 1) != values_of(1, 100);
    failures[0] = failure_of([&] { post.recv(1, kAnyRank); });
    failures[1] = failure_of([&] { post.recv(1, 1); });
    return wrong;
  });
  CHECK(wrong == 0);
  CHECK(failures[0].kind == FaultKind::kPeerLost);
  CHECK(contains(failures[0].text, "has left the group"));
  CHECK(failures[1].kind == FaultKind::kAborted);
}

TEST_CASE("the end of a group ends its recvs; then nothing can be posted") {
  std::vector<std::string> texts(2);
  run_shm_ranks({.world = 1}, [&](ShmRank& self) {
    Post post(self);
    Values values(1);
    const TransferPtr coming = post.start_recv(values, 0);
    std::thread waiter([&] { texts[0] = failure_of([&] { post.wait(coming); }).text; });
    ::usleep(10'000);
    post.courier().close();
    waiter.join();
    texts[1] = failure_of([&] { post.send(values, 0); }).text;
  });
  CHECK(contains(texts[0], "the group ended before a message came"));
  CHECK(contains(texts[1], "got a message after the group ended"));
}

TEST_CASE("a rank that dies while its peer waits for it is named within two seconds") {
  for (const bool any : {false, true}) {
    run_two_processes(
        [](ShmRank& self) {
          Post post(self);
          Values half(kMoreThanARing);
          const TransferPtr never_done = post.start_send(half, 0, 1);
          post.recv(1, 0, 9);
          ::pause();
        },
        [&](ShmRank& self, pid_t child) {
          Post post(self);
          post.send(values_of(1, 1), 1, 9);
          std::thread killer([child] {
            ::usleep(100'000);
            ::kill(child, SIGKILL);
          });
          const auto begin = Clock::now();
          const Failure failure = failure_of([&] { post.recv(1, any ? kAnyRank : 1, 5); });
          killer.join();
          CHECK(Clock::now() - begin < seconds(2));
          CHECK(failure.kind == FaultKind::kPeerLost);
          CHECK(contains(failure.text, "rank 1 (process " + std::to_string(child) + ") has died"));
          CHECK(
              contains(failure.text, any ? "from any rank with tag 5" : "from rank 1 with tag 5"));
          CHECK(failure_of([&] { post.send(Values(1), 1); }).kind == FaultKind::kAborted);
        });
  }
}

TEST_CASE("a process may end after its sends: its peer takes them later") {
  run_two_processes(
      [](ShmRank& self) {
        Post post(self);
        post.send(values_of(1, 1000), 0);
      },
      [](ShmRank& self, pid_t) {
        ::usleep(200'000);
        Post post(self);
        CHECK(post.recv(1000, 1) == values_of(1, 1000));
      });
}

TEST_CASE("a forked child can neither send nor receive, and its end changes nothing") {
  run_shm_ranks({}, [](ShmRank& self) {
    Post post(self);
    Values values(1);
    const TransferPtr coming = self.rank == 0 ? post.start_recv(values, 1) : nullptr;
    if (self.rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        Mailbox mailbox(self.group);
        auto transfer = std::make_shared<Transfer>();
        ::_exit(failure_of([&] { mailbox.post(transfer); }).kind == FaultKind::kForked ? 0 : 1);
      }
      int status = -1;
      ::waitpid(child, &status, 0);
      if (status != 0) throw std::runtime_error("the child could send");
      post.send(values_of(1, 1), 1);
      post.wait(coming);
    } else {
      post.send(post.recv(1, 0), 0);
    }
  });
}
