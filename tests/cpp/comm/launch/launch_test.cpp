#include <trireme/comm/launch/launch.h>

#include <trireme/comm/launch/rendezvous.h>
#include <trireme/common/cpus.h>

#include <ATen/Parallel.h>

#include <arpa/inet.h>
#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "catch_torch.h"
#include "thread_ranks.h"

namespace trireme::launch_test {
namespace {

using namespace std::chrono_literals;
using test::run_thread_ranks;
using test::ThreadRank;

// A listening socket on that port; by default one that the kernel chooses.
class TakenPort {
 public:
  explicit TakenPort(int number = 0) : socket_(::socket(AF_INET6, SOCK_STREAM, 0)) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>(number));
    socklen_t size = sizeof(address);
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    TORCH_CHECK(::bind(socket_, plain, size) == 0 && ::listen(socket_, 1) == 0);
    TORCH_CHECK(::getsockname(socket_, plain, &size) == 0);
    number_ = ntohs(address.sin6_port);
  }
  ~TakenPort() { ::close(socket_); }
  int number() const { return number_; }

 private:
  int socket_;
  int number_ = 0;
};

// Below the ports that the kernel chooses, of which another test may get this one meanwhile.
std::string free_endpoint() {
  static int number = 10'000 + ::getpid() % 20'000;
  for (;; ++number) {
    try {
      const TakenPort is_free(number);
      break;
    } catch (const c10::Error&) {
    }
  }
  return "tcp://127.0.0.1:" + std::to_string(number++);
}

std::string fresh_file() {
  std::string pattern = (std::filesystem::temp_directory_path() / "trireme_meet_XXXXXX").string();
  const int file = mkstemp(pattern.data());
  ::close(file);
  std::filesystem::remove(pattern);
  return pattern;
}

InitOptions as_rank(int64_t rank, int64_t world, const std::string& init_method) {
  InitOptions options;
  options.device = c10::Device(c10::DeviceType::CPU);
  options.init_method = init_method;
  options.rank = rank;
  options.world = world;
  options.timeout = 20s;
  options.set_threads = false;
  return options;
}

// Runs `rank_main` on a thread per rank; the first failure comes out.
void on_threads(int64_t world, const std::function<void(int64_t)>& rank_main) {
  std::vector<std::future<void>> ranks;
  for (int64_t rank = 0; rank < world; ++rank) {
    ranks.push_back(std::async(std::launch::async, rank_main, rank));
  }
  for (auto& rank : ranks) rank.wait();
  for (auto& rank : ranks) rank.get();
}

// Every rank adds its number plus one; what each of them got.
std::vector<double> sums_over(int64_t world, const std::string& init_method) {
  std::vector<double> sums(static_cast<size_t>(world));
  on_threads(world, [&](int64_t rank) {
    Context context = init(as_rank(rank, world, init_method));
    const at::Tensor sum = at::full({3}, static_cast<double>(rank + 1));
    context.communicator()->all_reduce({sum}, ReduceOp::kSum, "test").wait();
    sums[static_cast<size_t>(rank)] = sum[2].item<double>();
  });
  return sums;
}

// How many ranks are on their way out of the run.
int64_t count_of_left(const Context& context) { return context.store()->add("left", 0); }

RendezvousRequest request_of(int64_t rank, const std::string& file, int64_t attempt) {
  RendezvousRequest request{.environment = {}, .init_method = "file://" + file, .timeout = 30s};
  request.environment.rank = rank;
  request.environment.world = 2;
  request.environment.attempt = attempt;
  return request;
}

std::vector<std::unique_ptr<Rendezvous>> meet_in(const std::string& file, int64_t attempt) {
  std::vector<std::unique_ptr<Rendezvous>> ranks(2);
  on_threads(2, [&](int64_t rank) {
    ranks[static_cast<size_t>(rank)] =
        std::make_unique<Rendezvous>(request_of(rank, file, attempt));
  });
  return ranks;
}

template <typename Error>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "accepted";
}

std::string refused_options(const std::function<void(InitOptions&)>& change) {
  return refusal<c10::ValueError>([&] {
    InitOptions options = as_rank(0, 1, "");
    change(options);
    init(options);
  });
}

}  // namespace

TEST_CASE("ranks meet over TCP") {
  CHECK(sums_over(2, free_endpoint()) == std::vector<double>{3, 3});
}

TEST_CASE("ranks meet in a file, which is gone afterwards") {
  const std::string file = fresh_file();
  CHECK(sums_over(3, "file://" + file) == std::vector<double>{6, 6, 6});
  CHECK_FALSE(std::filesystem::exists(file));
}

TEST_CASE("the same ranks may meet again in the same place") {
  const std::string endpoint = free_endpoint();
  CHECK(sums_over(2, endpoint) == std::vector<double>{3, 3});
  CHECK(sums_over(2, endpoint) == std::vector<double>{3, 3});
}

TEST_CASE("a Store that outlives a run does not show it to the next") {
  const std::string file = fresh_file();
  const auto first = meet_in(file, 0);  // it keeps the file alive
  first[0]->store()->set("key", std::vector<uint8_t>{1});
  const auto second = meet_in(file, 0);
  CHECK(first[1]->store()->check({"key"}));
  CHECK_FALSE(second[1]->store()->check({"key"}));
}

TEST_CASE("restarted ranks meet although only one of them had come before") {
  const std::string file = fresh_file();
  RendezvousRequest request = request_of(0, file, 0);
  request.timeout = 100ms;
  CHECK_THROWS_AS(Rendezvous(request), c10::DistBackendError);
  CHECK(meet_in(file, 1).size() == 2);
}

TEST_CASE("a single rank needs no port") {
  Context context = init(as_rank(0, 1, ""));
  CHECK(context.rank() == 0);
  CHECK(context.world() == 1);
  CHECK(context.local_rank() == 0);
  CHECK(context.device() == c10::Device(c10::DeviceType::CPU));
  CHECK(context.process_group()->getBackend(c10::DeviceType::CPU)->getBackendName() == "trireme");
  const at::Tensor value = at::full({2}, 5.0);
  context.communicator()->all_reduce({value}, ReduceOp::kSum, "test").wait();
  CHECK(value[1].item<double>() == 5.0);
  CHECK(context.communicator() == context.communicator());
}

TEST_CASE("after shutdown a context gives nothing") {
  Context context = init(as_rank(0, 1, ""));
  context.shutdown();
  context.shutdown();
  CHECK(context.rank_of().world == 1);
  CHECK(refusal<c10::ValueError>([&] { context.communicator(); }) ==
        "[launch] the context was shut down (rank 0 of 1). Call shutdown() after the last use of "
        "the group.");
  Context moved = std::move(context);
  CHECK_THROWS_AS(moved.store(), c10::ValueError);
}

TEST_CASE("rank 0 serves the store until the last rank has left") {
  const std::string endpoint = free_endpoint();
  std::promise<void> rank_0_leaves;
  std::atomic<bool> rank_1_read{false};
  bool left_behind_it = false;
  on_threads(2, [&](int64_t rank) {
    std::optional<Context> context = init(as_rank(rank, 2, endpoint));
    if (rank == 0) {
      context->store()->set("word", std::vector<uint8_t>{7});
      rank_0_leaves.set_value();
      context.reset();
      left_behind_it = rank_1_read;
    } else {
      rank_0_leaves.get_future().wait();
      // Once rank 0 has counted itself, it serves only because it waits for this rank.
      while (count_of_left(*context) == 0) std::this_thread::yield();
      rank_1_read = context->store()->get("word") == std::vector<uint8_t>{7};
      context.reset();
    }
  });
  CHECK(rank_1_read);
  CHECK(left_behind_it);
}

TEST_CASE("the server does not wait for ever for a rank that never leaves") {
  const std::string endpoint = free_endpoint();
  std::vector<std::unique_ptr<Rendezvous>> ranks(2);
  on_threads(2, [&](int64_t rank) {
    RendezvousRequest request{.environment = {}, .init_method = endpoint, .timeout = 30s};
    request.environment.rank = rank;
    request.environment.world = 2;
    ranks[static_cast<size_t>(rank)] = std::make_unique<Rendezvous>(request);
  });
  CHECK_FALSE(ranks[0]->leave(200ms));
  CHECK(ranks[1]->leave(20s));
}

TEST_CASE("a port in use is named") {
  const TakenPort port;
  const std::string endpoint = "127.0.0.1:" + std::to_string(port.number());
  CHECK(refusal<c10::DistBackendError>([&] { init(as_rank(0, 2, "tcp://" + endpoint)); }) ==
        "[launch] " + endpoint +
            " (MASTER_PORT) is in use by another program (rank 0 of 2). Choose a free port, or "
            "wait until the other "
            "run has ended.");
}

TEST_CASE("a rank that nobody joins says where it waited") {
  const std::string endpoint = free_endpoint();
  InitOptions options = as_rank(0, 2, endpoint);
  options.timeout = 1s;
  CHECK(refusal<c10::DistBackendError>([&] { init(options); }) ==
        "[launch] the ranks did not find each other at " + endpoint.substr(6) +
            ": 1 of 2 came within 1000 ms (rank 0 of 2). Check that all ranks run, with the same "
            "address, port and "
            "world size, that rank 0 is on that host, and that no firewall is between them.");

  options.rank = 1;  // now nobody serves
  CHECK(refusal<c10::DistBackendError>([&] {
          init(options);
        }).find("[launch] the ranks did not find each other at " + endpoint.substr(6)) == 0);
}

TEST_CASE("options that cannot be honoured are refused") {
  CHECK(refused_options([](auto& options) { options.backend = "smoke"; }) ==
        "[launch] backend is 'smoke', expected trireme, gloo, nccl, or "
        "cpu:trireme,cuda:nccl (rank 0 of 1). "
        "Other engines of c10d "
        "are reached from Python.");
  CHECK(refused_options([](auto& options) { options.backend = "nccl"; }) ==
        "[launch] backend nccl cannot serve device cpu (rank 0 of 1). Use another backend, or "
        "leave it out.");
  CHECK(refused_options([](auto& options) {
          options.device = c10::Device(c10::DeviceType::Meta);
        }) == "[launch] device is meta, expected cpu or cuda (rank 0 of 1). Pass another device.");
  CHECK(refused_options([](auto& options) { options.timeout = 0ms; }) ==
        "[launch] timeout is 0 ms, expected more than 0 (rank 0 of 1). Pass a longer timeout.");
  CHECK(refused_options([](auto& options) { options.world.reset(); }) ==
        "[launch] rank and world were not given together. Pass both, or neither and let the "
        "environment say them.");
  for (const char* method :
       {"tcp://host", "tcp://:1", "tcp://host:0", "tcp://host:65536", "tcp://host:1x"}) {
    CHECK(refused_options([&](auto& options) { options.init_method = method; }) ==
          std::string("[launch] init_method is '") + method +
              "', expected tcp://host:port (rank 0 of 1). Use tcp://host:port, "
              "file:///absolute/path, or env:// with "
              "MASTER_ADDR and MASTER_PORT set.");
  }
  for (const char* method :
       {"file://", "file://relative/path", "file:///no/such/folder/file", "file:///tmp"}) {
    const std::string text = refused_options([&](auto& options) { options.init_method = method; });
    CHECK(text.find("expected file:// and the absolute path of a file in a folder that exists") !=
          std::string::npos);
  }
  CHECK(refused_options([](auto& options) {
          options.init_method = "host:1";
        }).find("expected tcp://, file:// or env://") != std::string::npos);
  CHECK_THROWS_AS(init(as_rank(2, 2, "")), std::invalid_argument);
}

TEST_CASE("several ranks without a place to meet are told what is missing") {
  CHECK(refused_options([](auto& options) { options.world = 2; }) ==
        "[launch] the ranks have no place to meet: MASTER_ADDR and MASTER_PORT are not set (rank 0 "
        "of 2). Start the "
        "program with torchrun, set the variables, or pass an init_method.");
}

TEST_CASE("CUDA without a GPU is refused, not replaced") {
  if (at::hasCUDA()) {
    SUCCEED("skipped: this machine has a GPU");
    return;
  }
  CHECK(refused_options([](auto& options) {
          options.device = c10::Device(c10::DeviceType::CUDA);
        }).find("[launch] device is cuda but this program sees no GPU (rank 0 of 1)") == 0);
}

TEST_CASE("NCCL without its library or without a GPU is refused, not replaced") {
  if (at::hasCUDA()) {
    SUCCEED("skipped: this machine has a GPU");
    return;
  }
  const std::string text = refused_options([](auto& options) {
    options.device.reset();
    options.backend = "nccl";
  });
  const bool no_library = text.find("[launch] NCCL cannot be used from C++ here: ") == 0;
  const bool no_gpu = text.find("[launch] device is cuda but this program sees no GPU") == 0;
  CAPTURE(text);
  CHECK((no_library || no_gpu));
}

TEST_CASE("init gives a lone rank all CPUs, unless told to leave the threads alone") {
  const char* said = std::getenv("OMP_NUM_THREADS");
  const std::string omp = said != nullptr ? said : "";
  const int before = at::get_num_threads();
  ::unsetenv("OMP_NUM_THREADS");
  at::set_num_threads(3);
  InitOptions options = as_rank(0, 1, "");
  init(options);
  CHECK(at::get_num_threads() == 3);
  options.set_threads = true;
  init(options);
  CHECK(at::get_num_threads() == static_cast<int>(usable_cpus()));
  at::set_num_threads(before);
  if (said != nullptr) ::setenv("OMP_NUM_THREADS", omp.c_str(), 1);
}

TEST_CASE("thread ranks: the first error comes out and the peers do not wait") {
  const auto one_gives_up = [](ThreadRank& rank) {
    if (rank.where.rank == 1) throw std::runtime_error("rank 1 gave up");
    const at::Tensor value = at::ones({1});
    rank.communicator->all_reduce({value}, ReduceOp::kSum, "test").wait();
  };
  // CTest ends this program long before the timeout of the group.
  CHECK_THROWS_WITH(run_thread_ranks(2, one_gives_up, 1h), "rank 1 gave up");
}

}  // namespace trireme::launch_test
