#include <trireme/strategies/remote/batches.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <catch_torch.h>
#include <condition_variable>
#include <deque>
#include <latch>
#include <map>
#include <mutex>
#include <optional>
#include <strategies/remote/remote_ranks.h>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme::endpoint_test {

using test::Engine;
using test::error_of;
using test::run_endpoints;
using test::run_thread_ranks;
using test::ThreadRank;

namespace {

using Catch::Contains;
using remote::Endpoint;
using remote::RefPtr;

class Counter {
 public:
  explicit Counter(int64_t start) : value_(start) { ++alive; }
  ~Counter() { --alive; }
  int64_t add(int64_t by) {
    const std::lock_guard lock(mutex_);
    return value_ += by;
  }
  int64_t get() const { return value_; }
  // Says beside each argument how many calls came at once.
  std::vector<std::tuple<int64_t, int64_t>> gather(const std::vector<int64_t>& numbers) {
    std::vector<std::tuple<int64_t, int64_t>> results;
    for (const int64_t number : numbers)
      results.emplace_back(number, static_cast<int64_t>(numbers.size()));
    return results;
  }

  static inline std::atomic<int64_t> alive{0};

 private:
  std::mutex mutex_;
  int64_t value_;
};

// Lets calls wait until a test says so.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  void open() {
    const std::lock_guard lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return is_open; });
  }
};
Gate* gate = nullptr;
// Calls of one rank in another, and so on, use the endpoint of the rank that they run at.
std::vector<Endpoint*> endpoints;

void define_all() {
  static const bool once = [] {
    remote::define("add", [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
    remote::define("swap", [](const std::tuple<std::string, int64_t>& pair,
                              const std::map<std::string, std::vector<double>>& more) {
      return std::tuple(std::get<1>(pair), std::get<0>(pair), more);
    });
    remote::define("maybe", [](std::optional<int64_t> given) { return given; });
    remote::define("fail", [](const std::string& text) { TORCH_CHECK_VALUE(false, text); });
    remote::define("wait", [] { gate->wait(); });
    remote::define("countdown", [](int64_t left) -> int64_t {
      if (left == 0) return 0;
      const auto here = static_cast<size_t>(left % 2);
      return 1 + endpoints[here]->call<int64_t>(here == 0 ? "p1" : "p0", "countdown", left - 1);
    });
    remote::define("use", [](const RefPtr& counter, int64_t by) {
      return endpoints[1]->call_method<int64_t>(counter, "add", by);
    });
    remote::define_class<Counter>(
        "Counter", remote::init<int64_t>(), remote::method("add", &Counter::add),
        remote::method("get", &Counter::get), remote::method("gather", &Counter::gather, 3));
    return true;
  }();
  static_cast<void>(once);
}

// Returns once something holds; throws where that takes long.
void until(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!holds()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "it does not come to hold");
    std::this_thread::yield();
  }
}

}  // namespace

TEST_CASE("Functions of other ranks, and of one's own, are called", "[remote]") {
  define_all();
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  std::vector<at::Tensor> sums(2);
  std::vector<std::string> texts(2);
  run_endpoints(
      2,
      [&](Endpoint& endpoint, int64_t rank) {
        const std::string other = rank == 0 ? "p1" : "p0";
        const at::Tensor numbers = at::arange(5, at::kFloat);
        sums[rank] = endpoint.call<at::Tensor>(other, "add", numbers, numbers * 2);
        TORCH_CHECK(endpoint.call<at::Tensor>("p" + std::to_string(rank), "add", numbers, numbers)
                        .equal(numbers * 2));
        const std::map<std::string, std::vector<double>> more{{"x", {1.5, 2}}};
        const auto [number, text, back] =
            endpoint
                .call<std::tuple<int64_t, std::string, std::map<std::string, std::vector<double>>>>(
                    other, "swap", std::tuple(std::string("eight"), int64_t{8}), more);
        TORCH_CHECK(number == 8 && text == "eight" && back == more);
        TORCH_CHECK(
            !endpoint.call<std::optional<int64_t>>(other, "maybe", std::optional<int64_t>()));
        TORCH_CHECK(endpoint.names() == std::vector<std::string>({"p0", "p1"}));
        texts[rank] = error_of([&] { endpoint.call(other, "fail", "so be it"); });
      },
      engine);
  for (const at::Tensor& sum : sums) CHECK(sum.equal(at::arange(5, at::kFloat) * 3));
  for (const std::string& text : texts) CHECK_THAT(text, Contains("so be it"));
  CHECK_THAT(texts[0], Contains("function fail at p1 (rank 1)"));
}

TEST_CASE("What cannot be called says why", "[remote]") {
  define_all();
  std::vector<std::string> texts;
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    texts = {error_of([&] { endpoint.call("p7", "add"); }),
             error_of([&] { endpoint.call("p1", "subtract"); }),
             error_of([&] { endpoint.call("p1", "add", at::ones({})); }),
             error_of([&] { endpoint.call("p1", "add", at::ones({}), int64_t{1}); }),
             error_of([&] { endpoint.call<int64_t>("p1", "add", at::ones({}), at::ones({})); })};
  });
  CHECK_THAT(texts[0], Contains("'p0' and 'p1'"));
  CHECK_THAT(texts[1], Contains("subtract") && Contains("'add'"));
  CHECK_THAT(texts[2], Contains("1 arguments, expected 2"));
  CHECK_THAT(texts[3], Contains("args[1] is an int, expected a Tensor"));
  CHECK_THAT(texts[4], Contains("the result is a Tensor, expected an int"));
}

TEST_CASE("What cannot be sent is refused with its place, in calls to oneself, too", "[remote]") {
  define_all();
  std::vector<std::string> texts;
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    const at::Tensor sparse = at::eye(3).to_sparse();
    const at::Tensor meta = at::empty({2}, at::device(at::kMeta));
    const std::map<std::string, std::vector<at::Tensor>> nested{{"x", {at::ones({}), meta}}};
    for (const char* to : {"p0", "p1"}) {
      texts.push_back(error_of([&] { endpoint.call("p1", "add", at::ones({}), sparse); }));
      texts.push_back(error_of([&] { endpoint.call(to, "add", nested); }));
      texts.push_back(error_of([&] { endpoint.call(to, "add", std::string("\xff")); }));
      texts.push_back(error_of([&] { endpoint.call(to, "add", at::Tensor()); }));
      texts.push_back(error_of([&] { endpoint.create(to, "Counter", RefPtr()); }));
    }
    TORCH_CHECK(endpoint.call<at::Tensor>("p1", "add", at::ones({}), at::ones({})).item<float>() ==
                2);
  });
  REQUIRE(texts.size() == 10);
  for (size_t i = 0; i < texts.size(); i += 5) {
    CHECK_THAT(texts[i], Contains("args[1] is a Tensor that has the layout Sparse"));
    CHECK_THAT(texts[i + 1], Contains("args[0]['x'][1] is a Tensor that is on the device meta"));
    CHECK_THAT(texts[i + 2], Contains("args[0] is a text that is not UTF-8"));
    CHECK_THAT(texts[i + 3], Contains("args[0] is an undefined Tensor"));
    CHECK_THAT(texts[i + 4], Contains("args[0] is a Ref of nothing"));
  }
}

TEST_CASE("Objects live as long as Refs to them", "[remote]") {
  define_all();
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  int64_t last = 0;
  std::string dead;
  std::vector<Endpoint*> all(3);
  std::latch ready(3);
  endpoints.assign(3, nullptr);
  run_endpoints(
      3,
      [&](Endpoint& endpoint, int64_t rank) {
        endpoints[rank] = &endpoint;
        ready.arrive_and_wait();
        if (rank != 0) return;
        RefPtr counter = endpoint.create("p1", "Counter", int64_t{5});
        TORCH_CHECK(Counter::alive == 1);
        TORCH_CHECK(endpoint.call_method<int64_t>(counter, "add", int64_t{2}) == 7);
        // It goes through a third rank to its owner.
        TORCH_CHECK(endpoint.call<int64_t>("p2", "use", counter, int64_t{3}) == 10);
        last = endpoint.call_method<int64_t>(counter, "get");
        counter.reset();
        until([] { return Counter::alive == 0; });

        const RefPtr own = endpoint.here(std::make_shared<Counter>(1), "Counter");
        TORCH_CHECK(endpoint.call<int64_t>("p1", "use", own, int64_t{3}) == 4);
        TORCH_CHECK(endpoint.local_value<Counter>(own)->get() == 4);
      },
      engine);
  CHECK(last == 10);
  CHECK(Counter::alive == 0);
}

TEST_CASE("Calls of a batch are served at once, in the order in which they come", "[remote]") {
  define_all();
  std::vector<int64_t> wrong(2, -1);
  run_endpoints(3, [&](Endpoint& endpoint, int64_t rank) {
    if (rank == 2) return;
    const auto mine = endpoint.create("p2", "Counter", int64_t{0});
    wrong[rank] = 0;
    std::deque<std::pair<int64_t, remote::Future<std::tuple<int64_t, int64_t>>>> calls;
    const auto finish_first = [&] {
      if (calls.front().second.wait() != std::tuple(calls.front().first, int64_t{3})) ++wrong[rank];
      calls.pop_front();
    };
    for (int64_t i = 0; i < 600; ++i) {
      if (calls.size() == 5) finish_first();
      calls.emplace_back(
          i, endpoint.call_method_async<std::tuple<int64_t, int64_t>>(mine, "gather", i));
    }
    while (!calls.empty()) finish_first();
  });
  CHECK(wrong == std::vector<int64_t>{0, 0});
}

TEST_CASE("A call that was given up, or whose caller is gone, is in no batch", "[remote]") {
  remote::Definition method;
  method.name = "Counter.gather";
  method.batch = 3;
  remote::Batches batches;
  const auto numbers_after = [&](int64_t from, int64_t number) {
    remote::ServedCall call;
    call.from = from;
    call.number = number;
    call.deadline = shm::Clock::time_point::max();
    std::vector<std::pair<int64_t, int64_t>> numbers;
    for (const auto& one : batches.add(method, std::move(call)).calls)
      numbers.emplace_back(one.from, one.number);
    return numbers;
  };
  CHECK(numbers_after(0, 7).empty());
  CHECK(numbers_after(1, 7).empty());
  batches.forget(0, 7);
  batches.forget(1, 8);  // is not there
  CHECK(numbers_after(2, 1).empty());
  batches.forget(2);
  CHECK(numbers_after(0, 8).empty());
  CHECK(numbers_after(0, 9) == std::vector<std::pair<int64_t, int64_t>>{{1, 7}, {0, 8}, {0, 9}});
}

TEST_CASE("Calls go round in circles with one thread each", "[remote]") {
  define_all();
  int64_t count = 0;
  std::latch ready(2);
  endpoints.assign(2, nullptr);
  run_endpoints(
      2,
      [&](Endpoint& endpoint, int64_t rank) {
        endpoints[rank] = &endpoint;
        ready.arrive_and_wait();
        if (rank == 0) count = endpoint.call<int64_t>("p1", "countdown", int64_t{21});
      },
      Engine::kShm, 1);
  CHECK(count == 21);
}

TEST_CASE("A call that is not answered ends at its deadline", "[remote]") {
  define_all();
  Gate closed;
  gate = &closed;
  std::string text;
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    const auto begin = std::chrono::steady_clock::now();
    text = error_of([&] { endpoint.within(std::chrono::milliseconds(200)).call("p1", "wait"); });
    TORCH_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
    closed.open();
    endpoint.call("p1", "maybe", std::optional<int64_t>());
  });
  CHECK_THAT(text,
             Contains("p1 (rank 1) has not answered within 0.2 s") && Contains("in function wait"));
}

TEST_CASE("Thousands of calls are in flight from several threads", "[remote]") {
  define_all();
  std::atomic<int64_t> sum{0};
  run_endpoints(
      2,
      [&](Endpoint& endpoint, int64_t rank) {
        if (rank != 0) return;
        std::vector<std::thread> threads;
        for (int64_t t = 0; t < 4; ++t)
          threads.emplace_back([&] {
            std::vector<remote::Future<std::optional<int64_t>>> calls;
            for (int64_t i = 0; i < 1000; ++i)
              calls.push_back(endpoint.call_async<std::optional<int64_t>>(
                  "p1", "maybe", std::optional<int64_t>(i)));
            for (const auto& call : calls) sum += *call.wait();
          });
        for (std::thread& thread : threads) thread.join();
      },
      Engine::kShm, 4);
  CHECK(sum == 4 * 999 * 1000 / 2);
}

TEST_CASE("Names that are equal are refused on all ranks", "[remote]") {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        texts[rank.where.rank] = error_of([&] { Endpoint(rank.communicator, "twin"); });
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& text : texts) CHECK_THAT(text, Contains("'twin'"));
}

TEST_CASE("After stop() nothing is called", "[remote]") {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Endpoint endpoint(rank.communicator, "p" + std::to_string(rank.where.rank));
        endpoint.stop();
        texts[rank.where.rank] = error_of([&] { endpoint.call("p1", "add"); });
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& text : texts) CHECK_THAT(text, Contains("stop"));
}

}  // namespace trireme::endpoint_test
