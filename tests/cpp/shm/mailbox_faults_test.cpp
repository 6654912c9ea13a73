// Messages that do not arrive: what is said, and what goes on.

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <optional>
#include <shm/post.h>
#include <string>
#include <unistd.h>

namespace trireme::mailbox_faults_test {

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_CASE(
    "another size or dtype than sent: the recv raises, a large send too, and the next one works") {
  std::vector<Failure> failures(4);
  std::vector<int> right(2);
  const auto fail = [&](Post& post, size_t numel, int64_t tag) {
    return failure_of([&] { post.recv(numel, 0, tag); });
  };
  run_shm_ranks({}, [&](ShmRank& self) {
    Post post(self);
    if (self.rank == 0) {
      post.send(values_of(1, 10), 1, 3);
      failures[3] = failure_of([&] { post.send(values_of(2, kMoreThanARing), 1, 3); });
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
  CHECK(failures[3].text ==
        "[mailbox] send of 300000 int32 to rank 1 with tag 3 sent 1200000 bytes of int32, but rank "
        "1 expected 16 bytes of int32 (rank 0 of 2). Send what the recv there expects; this "
        "message is lost.");
}

TEST_CASE("a send that fits into the ring is done, however early its destination refused it") {
  constexpr size_t kMoreThanHalfARing = 40'000;
  Failure sent;
  Failure received;
  run_shm_ranks({}, [&](ShmRank& self) {
    Post post(self);
    if (self.rank == 0) {
      sent = failure_of([&] {
        post.send(values_of(1, kMoreThanHalfARing), 1);
        post.send(values_of(2, kMoreThanHalfARing), 1);  // waits for room: refused on its way
      });
      return;
    }
    post.recv(kMoreThanHalfARing, 0);
    received = failure_of([&] { post.recv(4, 0); });
  });
  CHECK(sent.text == "no fault");
  CHECK(contains(received.text, "expected 16 bytes of int32"));
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
      until([&] { return self.group.failure().has_value(); });
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
    until([&] { return self.group.block(1).outbox_state == OutboxState::kClosed; });
    const int wrong = post.recv(100, 1) != values_of(1, 100);
    for (const int64_t rank : {1, 2})
      until([&] { return self.group.block(rank).state == RankState::kLeft; });
    failures[0] = failure_of([&] { post.recv(1, kAnyRank); });
    failures[1] = failure_of([&] { post.recv(1, 1); });
    return wrong;
  });
  CHECK(wrong == 0);
  CHECK(failures[0].kind == FaultKind::kPeerLost);
  CHECK(contains(failures[0].text, "ended normally"));
  CHECK(failures[1].kind == FaultKind::kAborted);
}

TEST_CASE("the end of a group ends its recvs; then nothing can be posted") {
  std::vector<std::string> texts(2);
  run_shm_ranks({.world = 1}, [&](ShmRank& self) {
    Post post(self);
    Values values(1);
    const TransferPtr coming = post.start_recv(values, 0);
    std::thread waiter([&] { texts[0] = failure_of([&] { post.wait(coming); }).text; });
    until_asleep(self.group, 0);
    post.courier().close();
    waiter.join();
    texts[1] = failure_of([&] { post.send(values, 0); }).text;
  });
  CHECK(contains(texts[0], "the group ended before a message came"));
  CHECK(contains(texts[1], "got a message after the group ended"));
}

TEST_CASE("a process that dies while its peer waits for it is named") {
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
          std::thread killer([&self, child] {
            until_asleep(self.group, 0);
            ::kill(child, SIGKILL);
          });
          const Failure failure = failure_of([&] { post.recv(1, any ? kAnyRank : 1, 5); });
          killer.join();
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
        until([&] { return self.group.block(1).outbox_state == OutboxState::kClosed; });
        Post post(self);
        CHECK(post.recv(1000, 1) == values_of(1, 1000));
      });
}

// Says whether each other thread of this process sleeps.
bool all_others_sleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::gettid())) continue;
    std::ifstream file(task.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    const size_t name_ends = stat.rfind(')');
    if (name_ends == std::string::npos || stat[name_ends + 2] != 'S') return false;
  }
  return true;
}

TEST_CASE("a forked process can neither send nor receive, and its end changes nothing") {
  int status = -1;
  run_shm_ranks({}, [&](ShmRank& self) {
    std::optional<Post> post(std::in_place, self);
    if (self.rank == 1) {
      for (int i = 0; i < 2; ++i) post->send(post->recv(1, 0), 0);
      return;
    }
    for (int i = 0; i < 2; ++i) {
      Values values(1);
      const TransferPtr coming = post->start_recv(values, 1);  // the first starts the thread
      if (i == 1) {
        until(
            [] { return all_others_sleep(); });  // a lock of malloc's would stay taken in the child
        const pid_t child = ::fork();
        if (child == 0) {
          ::alarm(5);
          Mailbox mailbox(self.group);
          const Failure failure = failure_of([&] { mailbox.post(std::make_shared<Transfer>()); });
          post.reset();
          ::_exit(failure.kind == FaultKind::kForked ? 0 : 1);
        }
        ::waitpid(child, &status, 0);
      }
      post->send(values_of(1, 1), 1);
      post->wait(coming);
    }
  });
  CHECK(status == 0);
}

}  // namespace trireme::mailbox_faults_test
