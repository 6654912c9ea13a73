// What is seen in threads is asserted on the main thread.

#include <trireme/common/worker_pool.h>

#include <trireme/common/intra_op_threads.h>

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <atomic>
#include <catch_torch.h>
#include <chrono>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace trireme::worker_pool_test {

namespace {

std::vector<c10::Device> cpu_devices(size_t count) {
  return std::vector<c10::Device>(count, c10::Device(c10::kCPU));
}

std::vector<size_t> everybody(const WorkerPool& pool) {
  std::vector<size_t> all(pool.count());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

// Returns those of the worker threads, seen from inside.
std::vector<int> threads_seen(WorkerPool& pool) {
  std::vector<int> seen(pool.count());
  pool.run(everybody(pool), [&](size_t worker) { seen[worker] = at::get_num_threads(); });
  return seen;
}

}  // namespace

TEST_CASE("a job runs on each worker, in threads that stay") {
  WorkerPool pool(cpu_devices(3), {1, 1, 1});
  pool.start();
  std::vector<std::set<std::thread::id>> ids(3);
  for (int round = 0; round < 20; ++round)
    pool.run({0, 1, 2}, [&](size_t worker) { ids[worker].insert(std::this_thread::get_id()); });
  std::set<std::thread::id> all{std::this_thread::get_id()};
  for (const auto& of_worker : ids) {
    CHECK(of_worker.size() == 1);
    all.insert(of_worker.begin(), of_worker.end());
  }
  CHECK(all.size() == 4);
}

TEST_CASE("workers run at the same time") {
  WorkerPool pool(cpu_devices(3), {1, 1, 1});
  pool.start();
  std::atomic<int> here{0};
  std::atomic<int> met{0};
  pool.run({0, 1, 2}, [&](size_t /*worker*/) {
    ++here;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (here < 3 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    if (here == 3) ++met;
  });
  CHECK(met == 3);
}

TEST_CASE("only those that are named run") {
  WorkerPool pool(cpu_devices(3), {1, 1, 1});
  pool.start();
  std::vector<int> runs(3);
  CHECK(pool.run({2, 0}, [&](size_t worker) { ++runs[worker]; }).size() == 2);
  CHECK(runs == std::vector<int>{1, 0, 1});
}

TEST_CASE("what a job throws comes back in its place, and the next one works") {
  WorkerPool pool(cpu_devices(3), {1, 1, 1});
  pool.start();
  for (int round = 0; round < 3; ++round) {
    const auto errors = pool.run({0, 1, 2}, [](size_t worker) {
      if (worker == 1) throw std::runtime_error("one fell");
      TORCH_CHECK(worker != 2, "two fell");
    });
    REQUIRE(errors.size() == 3);
    CHECK(text_of(errors[0]).empty());
    CHECK(text_of(errors[1]) == "one fell");
    CHECK_THAT(text_of(errors[2]), Catch::Contains("two fell"));
    for (const auto& error : pool.run({0, 1, 2}, [](size_t /*worker*/) {})) CHECK_FALSE(error);
  }
}

TEST_CASE("a job has the modes of the thread that gave it, for as long as it runs") {
  WorkerPool pool(cpu_devices(2), {1, 1});
  pool.start();
  struct Modes {
    bool grad, inference, autocast;
  };
  const auto seen = [&] {
    std::vector<Modes> modes(2);
    pool.run({0, 1}, [&](size_t worker) {
      modes[worker] = {at::GradMode::is_enabled(), c10::InferenceMode::is_enabled(),
                       at::autocast::is_autocast_enabled(at::kCPU)};
      at::GradMode::set_enabled(!at::GradMode::is_enabled());  // is taken back
    });
    return modes;
  };
  for (const Modes& modes : seen()) CHECK((modes.grad && !modes.inference && !modes.autocast));
  {
    const at::NoGradGuard no_grad;
    for (const Modes& modes : seen()) CHECK_FALSE(modes.grad);
  }
  {
    const c10::InferenceMode inference;
    for (const Modes& modes : seen()) CHECK((modes.inference && !modes.grad));
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const std::vector<Modes> cast = seen();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  for (const Modes& modes : cast) CHECK(modes.autocast);
  for (const Modes& modes : seen()) CHECK((modes.grad && !modes.autocast));
}

TEST_CASE("each worker has its number of intra-op threads, the caller keeps its own") {
  const int before = at::get_num_threads();
  WorkerPool pool(cpu_devices(3), {1, 2, 3});
  pool.start();
  CHECK(threads_seen(pool) == std::vector<int>{1, 2, 3});
  CHECK(at::get_num_threads() == before);
  SECTION("and so do threads that begin later") {
    int later = 0;
    std::thread([&] { later = at::get_num_threads(); }).join();
    CHECK(later == before);
    CHECK(threads_seen(pool) == std::vector<int>{1, 2, 3});
  }
}

TEST_CASE("the caller may have threads of its own serve the pool") {
  std::vector<std::thread> threads;
  std::atomic<int> left{0};
  std::vector<std::thread::id> seen(2);
  std::vector<std::thread::id> expected;
  {
    WorkerPool pool(cpu_devices(2), {1, 1});
    for (const size_t worker : {0, 1}) {
      threads.emplace_back([&left, worker_loop = pool.worker_loop(worker)] {
        worker_loop();
        ++left;
      });
      expected.push_back(threads.back().get_id());
    }
    pool.run({0, 1}, [&](size_t worker) { seen[worker] = std::this_thread::get_id(); });
    CHECK(left == 0);
  }
  // The seats return when the pool is gone.
  for (std::thread& thread : threads) thread.join();
  CHECK(seen == expected);
  CHECK(left == 2);
}

TEST_CASE("while it waits, the caller looks around") {
  WorkerPool pool(cpu_devices(1), {1});
  pool.start();
  std::atomic<bool> seen{false};
  int looks = 0;
  const auto job = [&](size_t /*worker*/) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!seen && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  };
  pool.run({0}, job, [&] {
    ++looks;
    seen = true;
  });
  CHECK(looks >= 1);
  CHECK(seen);
}

TEST_CASE("callers take turns") {
  WorkerPool pool(cpu_devices(2), {1, 1});
  pool.start();
  std::vector<int64_t> counts(2);  // only the worker of that number writes one
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round)
        pool.run({0, 1}, [&](size_t worker) { ++counts[worker]; });
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(counts == std::vector<int64_t>{400, 400});
}

TEST_CASE("a pool that never started, and one that was stopped, end") {
  {
    const WorkerPool pool(cpu_devices(2), {1, 1});
  }
  WorkerPool pool(cpu_devices(2), {1, 1});
  pool.start();
  pool.stop();
  CHECK_THROWS_WITH(pool.run({0}, [](size_t /*worker*/) {}),
                    Catch::Contains("[data_parallel] got a call after the threads"));
}

TEST_CASE("a forked process has no threads of the pool, and is told so") {
  WorkerPool pool(cpu_devices(2), {1, 1});
  pool.start();
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      pool.run({0, 1}, [](size_t /*worker*/) {});
    } catch (const c10::ValueError& error) {
      status = std::string(error.what()).find("in a forked child") != std::string::npos ? 0 : 2;
    }
    _exit(status);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  CHECK(pool.run({0, 1}, [](size_t /*worker*/) {}).size() == 2);
}

}  // namespace trireme::worker_pool_test
