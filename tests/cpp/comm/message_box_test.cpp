// Posts from any rank to any, through the memory of a host and over Gloo.

#include <trireme/comm/message_box.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <latch>
#include <map>
#include <stdexcept>
#include <thread>
#include <thread_ranks.h>
#include <vector>

namespace trireme::message_box_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);
constexpr int64_t kRoom = 256;  // messages that a lane holds
const std::vector<Engine> kEngines{Engine::kShm, Engine::kGloo};
using Tensors = std::vector<at::Tensor>;
using Texts = std::vector<std::string>;

// Takes until enough has come, asleep on the futex in between.
void take_until(MessageBox& box, const std::function<bool()>& is_enough,
                const std::function<void(MessageBox::Arrival&)>& see) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(25);
  const auto look = [&] {
    for (MessageBox::Arrival& arrival : box.take_arrivals()) see(arrival);
    return is_enough();
  };
  shm::FutexWait(box.futex()).until(look, [&] {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("nothing comes");
    box.look();
    return false;
  });
}

void refuse_arrival(MessageBox::Arrival&) { throw std::runtime_error("more than was awaited"); }

// Posts, and takes while there is no room.
void post(MessageBox& box, int64_t to, const TensorMessage& message,
          const std::function<void(MessageBox::Arrival&)>& see = refuse_arrival) {
  take_until(box, [&] { return box.try_post(to, message, "a post"); }, see);
}

TensorMessage text_message(std::string text, Tensors tensors = {}) {
  TensorMessage message;
  message.text = std::move(text);
  message.tensors = std::move(tensors);
  return message;
}

bool has_all_ended(const ThreadRank& rank, const MessageBox& box) {
  for (int64_t other = 0; other < rank.where.world; ++other)
    if (other != rank.where.rank && !box.has_ended(other)) return false;
  return true;
}

// Runs ranks with a box each, which tell each other at the end that nothing more comes.
void run_boxes(int64_t world, Engine engine,
               const std::function<void(ThreadRank&, MessageBox&)>& rank_main,
               std::chrono::seconds timeout = kTimeout) {
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        MessageBox box(*rank.communicator);
        rank_main(rank, box);
        for (int64_t other = 0; other < world; ++other)
          if (other != rank.where.rank)
            take_until(box, [&] { return box.try_end(other); }, refuse_arrival);
        take_until(
            box, [&] { return has_all_ended(rank, box) && box.is_drained(); }, refuse_arrival);
        // What an engine has on its way goes with its box: the last message, too.
        rank.communicator->barrier("the end").wait();
      },
      timeout, engine);
}

at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype, int64_t seed) {
  at::Tensor bytes = at::arange(at::empty(sizes, dtype).nbytes(), at::kLong).mul(7).add(seed);
  return bytes.remainder(dtype == at::kBool ? 2 : 251).to(at::kByte).view(dtype).view(sizes);
}

bool has_same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.contiguous().view({-1}).view(at::kByte);
  };
  return a.numel() == 0 || at::equal(bytes(a), bytes(b));
}

Tensors many_tensors() {
  Tensors tensors{at::Tensor(),
                  at::empty({0, 4}, at::kDouble),
                  filled({}, at::kLong, 3),
                  filled({4, 6}, at::kFloat, 5).t(),
                  filled({4, 6}, at::kHalf, 5).slice(1, 0, 6, 2),
                  filled({1, 3}, at::kFloat, 2).expand({4, 3})};
  for (const at::ScalarType dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn})
    tensors.push_back(filled({3, 5}, dtype, 11));
  return tensors;
}

}  // namespace

TEST_CASE("what each rank posts to each other one comes in order") {
  constexpr int64_t kWorld = 3;
  constexpr int64_t kPosts = 2 * kRoom + 7;
  for (const Engine engine : kEngines) {
    std::vector<std::map<int64_t, Texts>> came(kWorld);
    run_boxes(kWorld, engine, [&](ThreadRank& rank, MessageBox& box) {
      auto& own = came[static_cast<size_t>(rank.where.rank)];
      int64_t missing = (kWorld - 1) * kPosts;
      const auto see = [&](MessageBox::Arrival& arrival) {
        own[arrival.from].push_back(arrival.message.text);
        --missing;
      };
      for (int64_t number = 0; number < kPosts; ++number)
        for (int64_t to = 0; to < kWorld; ++to)
          if (to != rank.where.rank) post(box, to, text_message(std::to_string(number)), see);
      take_until(box, [&] { return missing == 0; }, see);
    });
    Texts expected;
    for (int64_t number = 0; number < kPosts; ++number) expected.push_back(std::to_string(number));
    for (int64_t to = 0; to < kWorld; ++to)
      for (int64_t from = 0; from < kWorld; ++from)
        if (from != to) CHECK(came[static_cast<size_t>(to)][from] == expected);
  }
}

TEST_CASE("one rank answers many") {
  constexpr int64_t kWorld = 4;
  constexpr int64_t kCalls = 60;
  for (const Engine engine : kEngines) {
    std::atomic<int64_t> wrong{0};
    run_boxes(kWorld, engine, [&](ThreadRank& rank, MessageBox& box) {
      if (rank.where.rank == 0) {
        int64_t answered = 0;
        take_until(
            box, [&] { return answered == (kWorld - 1) * kCalls; },
            [&](MessageBox::Arrival& arrival) {
              const at::Tensor sum = arrival.message.tensors[0] + arrival.from;
              wrong += !box.try_post(arrival.from, text_message("answer", {sum}), "an answer");
              ++answered;
            });
        return;
      }
      for (int64_t call = 0; call < kCalls; ++call) {
        post(box, 0, text_message("call", {at::full({9}, double(call))}));
        bool has_come = false;
        take_until(
            box, [&] { return has_come; },
            [&](MessageBox::Arrival& arrival) {
              const at::Tensor expected = at::full({9}, double(call + rank.where.rank));
              wrong += arrival.from != 0 || !at::equal(arrival.message.tensors[0], expected);
              has_come = true;
            });
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("a post brings its tensors as they were, and they stay so") {
  std::vector<Tensors> posts;
  for (const at::Tensor& tensor : many_tensors()) posts.push_back({tensor});
  posts.push_back(many_tensors());
  // More than is copied where it comes, alone, together and with small ones.
  posts.push_back({filled({70'000}, at::kInt, 1)});
  posts.push_back({filled({100, 700}, at::kFloat, 2).t(), filled({3}, at::kFloat, 3)});
  posts.push_back({filled({40'000}, at::kByte, 4), filled({40'000}, at::kByte, 5)});
  posts.push_back({});
  for (const Engine engine : kEngines) {
    std::vector<TensorMessage> came;
    run_boxes(2, engine, [&](ThreadRank& rank, MessageBox& box) {
      if (rank.where.rank == 0) {
        for (size_t i = 0; i < posts.size(); ++i) {
          Tensors tensors;
          for (const at::Tensor& tensor : posts[i])
            tensors.push_back(tensor.defined() ? tensor.clone() : tensor);
          post(box, 1, text_message(std::string(i, 'x') + '\0', tensors));
          for (const at::Tensor& tensor : tensors)
            if (tensor.defined()) tensor.zero_();  // it is this rank's again
        }
        for (int64_t i = 0; i < 40; ++i) post(box, 1, text_message("", {at::zeros({30'000})}));
        return;
      }
      size_t seen = 0;
      take_until(
          box, [&] { return seen == posts.size() + 40; },
          [&](MessageBox::Arrival& arrival) {
            if (seen++ < posts.size()) came.push_back(std::move(arrival.message));
          });
    });
    REQUIRE(came.size() == posts.size());
    for (size_t i = 0; i < posts.size(); ++i) {
      INFO("post " << i);
      CHECK(came[i].text == std::string(i, 'x') + '\0');
      CHECK(std::equal(came[i].tensors.begin(), came[i].tensors.end(), posts[i].begin(),
                       posts[i].end(), has_same_bytes));
    }
  }
}

TEST_CASE("non-contiguous and expanded tensors are posted as they are") {
  for (const Engine engine : kEngines) {
    const Tensors sent{filled({300, 500}, at::kFloat, 1).t(),
                       filled({300, 500}, at::kFloat, 1).slice(1, 0, 500, 3),
                       filled({1, 3}, at::kFloat, 2).expand({40'000, 3})};
    Tensors came;
    run_boxes(2, engine, [&](ThreadRank& rank, MessageBox& box) {
      if (rank.where.rank == 0) return post(box, 1, text_message("", sent));
      take_until(
          box, [&] { return !came.empty(); },
          [&](MessageBox::Arrival& arrival) { came = arrival.message.tensors; });
    });
    CHECK(std::equal(came.begin(), came.end(), sent.begin(), sent.end(), has_same_bytes));
  }
}

TEST_CASE("a lane that is full says so, and has room when its posts were taken") {
  std::latch is_full(2);
  std::latch is_taken(2);
  int64_t posted = 0;
  int64_t taken = 0;
  std::vector<bool> said;
  run_boxes(2, Engine::kShm, [&](ThreadRank& rank, MessageBox& box) {
    if (rank.where.rank == 0) {
      said = {box.has_room(1), box.is_drained()};
      while (posted < 2 * kRoom && box.try_post(1, text_message("post"), "a post")) ++posted;
      said.insert(said.end(), {box.has_room(1), box.is_drained(), box.try_end(1)});
      is_full.arrive_and_wait();
      is_taken.arrive_and_wait();
      take_until(box, [&] { return box.has_room(1); }, refuse_arrival);
      said.insert(said.end(), {box.is_drained(), box.try_post(1, text_message("last"), "a post")});
      return;
    }
    is_full.arrive_and_wait();
    const auto see = [&](MessageBox::Arrival&) { ++taken; };
    take_until(box, [&] { return taken == kRoom; }, see);
    is_taken.arrive_and_wait();
    take_until(box, [&] { return taken == kRoom + 1; }, see);
  });
  CHECK(posted == kRoom);
  CHECK(taken == kRoom + 1);
  CHECK(said == std::vector<bool>{true, true, false, false, false, true, true});
}

TEST_CASE("a rank has ended when all that it has posted was taken") {
  for (const Engine engine : kEngines) {
    Texts came;
    std::vector<bool> said;
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          MessageBox box(*rank.communicator);
          const int64_t other = 1 - rank.where.rank;
          const auto see = [&](MessageBox::Arrival& arrival) {
            came.push_back(arrival.message.text);
          };
          if (rank.where.rank == 0) {
            for (const char* text : {"a", "b", "c"}) post(box, 1, text_message(text));
            take_until(box, [&] { return box.try_end(1); }, refuse_arrival);
            take_until(box, [&] { return box.has_ended(1) && box.is_drained(); }, refuse_arrival);
            said.insert(said.end(), {box.look().empty(), !box.why_gone(1)});
          } else {
            said.push_back(box.has_ended(0));
            take_until(box, [&] { return box.has_ended(0); }, see);
            take_until(box, [&] { return box.try_end(other); }, refuse_arrival);
            take_until(box, [&] { return box.is_drained(); }, refuse_arrival);
          }
          rank.communicator->barrier("the end").wait();
        },
        kTimeout, engine);
    CHECK(came == Texts{"a", "b", "c"});
    CHECK(said == std::vector<bool>{false, true, true});
  }
}

TEST_CASE("threads post to one rank at the same time") {
  constexpr int64_t kThreads = 3;
  constexpr int64_t kPosts = 200;
  for (const Engine engine : kEngines) {
    std::map<std::string, std::vector<int64_t>> came;
    run_boxes(2, engine, [&](ThreadRank& rank, MessageBox& box) {
      if (rank.where.rank == 1) {
        int64_t missing = kThreads * kPosts;
        take_until(
            box, [&] { return missing == 0; },
            [&](MessageBox::Arrival& arrival) {
              came[arrival.message.text].push_back(arrival.message.tensors[0].item<int64_t>());
              --missing;
            });
        return;
      }
      std::vector<std::thread> threads;
      for (int64_t thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([&, thread] {
          for (int64_t i = 0; i < kPosts; ++i)
            while (!box.try_post(1, text_message(std::to_string(thread), {at::full({}, i)}), "F"))
              std::this_thread::yield();
        });
      for (std::thread& thread : threads) thread.join();
    });
    CHECK(came.size() == kThreads);
    for (const auto& [thread, numbers] : came) {
      CHECK(numbers.size() == kPosts);
      CHECK(std::is_sorted(numbers.begin(), numbers.end()));
    }
  }
}

TEST_CASE("a tensor that no message can hold is refused, and the box goes on") {
  for (const Engine engine : kEngines) {
    std::string said;
    Texts came;
    run_boxes(2, engine, [&](ThreadRank& rank, MessageBox& box) {
      if (rank.where.rank == 0) {
        said = error_of<c10::TypeError>(
            [&] { box.try_post(1, text_message("", {at::eye(3).to_sparse()}), "call of f"); });
        post(box, 1, text_message("fine"));
        return;
      }
      take_until(
          box, [&] { return !came.empty(); },
          [&](MessageBox::Arrival& arrival) { came.push_back(arrival.message.text); });
    });
    CHECK_THAT(said, Catch::Contains("call of f") && Catch::Contains("layout Sparse"));
    CHECK(came == Texts{"fine"});
  }
}

TEST_CASE("a rank that goes is named once, and nothing can be posted to it") {
  std::vector<int64_t> gone;
  std::string why;
  std::string said;
  std::string state;
  Texts came;
  std::latch is_known(2);
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        auto box = std::make_unique<MessageBox>(*rank.communicator);
        rank.communicator->barrier("connected").wait();
        if (rank.where.rank == 1) {
          post(*box, 0, text_message("farewell"));
          take_until(*box, [&] { return box->is_drained(); }, refuse_arrival);
          box.reset();
          rank.communicator.reset();
          rank.group.reset();
          return;
        }
        if (rank.where.rank == 0) {
          state = box->state_of(2);
          const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (gone.empty() && std::chrono::steady_clock::now() < deadline) {
            gone = box->look();
            if (!gone.empty()) break;  // everything of it has been taken
            for (MessageBox::Arrival& arrival : box->take_arrivals())
              came.push_back(arrival.message.text);
          }
          for (const int64_t again : box->look()) gone.push_back(again);
          why = box->why_gone(1).value_or("nothing");
          if (box->why_gone(2)) why = "rank 2 is there";
          said = error_of<c10::DistBackendError>(
              [&] { box->try_post(1, text_message("hello"), "call of f"); });
        }
        is_known.arrive_and_wait();
      },
      kTimeout, Engine::kShm);
  CHECK(gone == std::vector<int64_t>{1});
  CHECK(came == Texts{"farewell"});
  CHECK_THAT(why, Catch::Contains("ended normally"));
  CHECK_THAT(said, Catch::Contains("cannot post call of f") && Catch::Contains(why));
  CHECK_THAT(state, Catch::StartsWith("alive ("));
}

TEST_CASE("over an engine ranks that say nothing for longer than its timeout stay connected") {
  constexpr std::chrono::seconds kShort{4};
  Texts came;
  std::vector<int64_t> gone;
  run_boxes(
      2, Engine::kGloo,
      [&](ThreadRank& rank, MessageBox& box) {
        if (rank.where.rank == 0) {
          const auto until = std::chrono::steady_clock::now() + kShort + std::chrono::seconds(1);
          take_until(box, [&] { return std::chrono::steady_clock::now() > until; }, refuse_arrival);
          return post(box, 1, text_message("late"));
        }
        take_until(
            box, [&] { return !came.empty(); },
            [&](MessageBox::Arrival& arrival) { came.push_back(arrival.message.text); });
        gone = box.look();
      },
      kShort);
  CHECK(came == Texts{"late"});
  CHECK(gone.empty());
}

TEST_CASE("over an engine nothing follows the last message to a rank") {
  std::latch is_drained(2);
  std::string said;
  run_boxes(2, Engine::kGloo, [&](ThreadRank& rank, MessageBox& box) {
    if (rank.where.rank == 0) {
      box.try_end(1);
      box.look();  // a heartbeat is due
      take_until(box, [&] { return box.is_drained(); }, refuse_arrival);
      said = error_of<c10::DistBackendError>(
          [&] { box.try_post(1, text_message("late"), "call of f"); });
    }
    is_drained.arrive_and_wait();
  });
  CHECK_THAT(said, Catch::Contains("cannot post call of f: this rank has posted its last message"));
}

TEST_CASE("a box of a rank alone has nobody") {
  bool is_fine = false;
  run_boxes(1, Engine::kShm, [&](ThreadRank&, MessageBox& box) {
    box.wake();
    is_fine = box.take_arrivals().empty() && box.look().empty() && box.is_drained();
  });
  CHECK(is_fine);
}

}  // namespace trireme::message_box_test
