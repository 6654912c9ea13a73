#include <trireme/comm/host_layout.h>
#include <trireme/comm/shm_backend.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <catch_torch.h>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace trireme {
namespace {

using namespace std::chrono_literals;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Ranks = std::vector<int64_t>;

// Calls `rank_main` on as many threads as `hosts` has letters, each a rank of a host that has all
// ranks of its letter. Returns what they throw, by rank.
std::vector<std::string> on_hosts(const std::string& hosts,
                                  const std::function<void(int64_t, const Group&)>& rank_main) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto world = static_cast<int64_t>(hosts.size());
  std::vector<std::string> errors(hosts.size());
  std::vector<Group> groups(hosts.size());  // alive until all have ended
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<size_t>(rank);
      try {
        at::set_num_threads(1);
        groups[index] = make_shm_group(store, {rank, world},
                                       {.timeout = 20s,
                                        .connect_timeout = 20s,
                                        .hostname = "127.0.0.1",
                                        .host_partition = hosts.substr(index, 1)});
        rank_main(rank, groups[index]);
      } catch (const std::exception& error) {
        errors[index] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Small integers, so that sums are exact in any order; each element has its own.
at::Tensor held(int64_t rank, int64_t numel) { return (at::arange(numel) + rank) % 31; }

at::Tensor total(int64_t world, int64_t numel) {
  at::Tensor sum = at::zeros({numel}, at::kLong);
  for (int64_t rank = 0; rank < world; ++rank) sum += held(rank, numel);
  return sum;
}

bool all_verbs(int64_t rank, int64_t world, const Group& group, int64_t numel) {
  std::vector<at::Tensor> tensors{held(rank, numel).to(at::kFloat)};
  group->allreduce(tensors)->wait();
  bool fine = at::equal(tensors[0], total(world, numel).to(at::kFloat));

  c10d::ReduceOptions to_last;
  to_last.rootRank = world - 1;
  tensors = {held(rank, numel)};
  group->reduce(tensors, to_last)->wait();
  fine &= at::equal(tensors[0], rank == world - 1 ? total(world, numel) : held(rank, numel));

  tensors = {at::empty({numel}, at::kLong)};
  std::vector<std::vector<at::Tensor>> lists{held(rank, numel * world).chunk(world)};
  group->reduce_scatter(tensors, lists)->wait();
  fine &=
      at::equal(tensors[0], total(world, numel * world).chunk(world)[static_cast<size_t>(rank)]);

  tensors = {held(rank, numel)};
  group->allgather(lists, tensors)->wait();
  for (int64_t peer = 0; peer < world; ++peer)
    fine &= at::equal(lists[0][static_cast<size_t>(peer)], held(peer, numel));

  for (int64_t root = 0; root < world; ++root) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    tensors = {held(rank, numel)};
    group->broadcast(tensors, options)->wait();
    fine &= at::equal(tensors[0], held(root, numel));
  }
  group->barrier()->wait();
  return fine;
}

}  // namespace

TEST_CASE("a layout says who connects to whom") {
  //   {0, 3} {1, 2, 4}: legs 0 - 1 and 3 - 2; rank 4 has none, its data goes by leg 0
  const std::vector<Ranks> hosts{{0, 3}, {1, 2, 4}};
  const HostLayout layout(hosts, 2);
  CHECK(layout.legs == 2);
  CHECK(layout.world == 5);
  CHECK((layout.host == 1 && layout.place == 1 && layout.has_leg()));
  CHECK_FALSE(HostLayout(hosts, 4).has_leg());
  CHECK(layout.carried(0, 1) == Ranks{3});
  CHECK(layout.carried(1, 0) == Ranks{1, 4});
  CHECK((layout.host_of(3) == 0 && layout.place_of(3) == 1));
}

TEST_CASE("three hosts of several ranks") {
  for (const std::string hosts : {"aabbcc", "abcabc", "aabbbcc"}) {
    const auto world = static_cast<int64_t>(hosts.size());
    std::mutex mutex;
    std::vector<std::string> wrong;
    const auto errors = on_hosts(hosts, [&](int64_t rank, const Group& group) {
      for (const int64_t numel : {int64_t{1}, int64_t{5000}, int64_t{600'001}}) {
        if (all_verbs(rank, world, group, numel)) continue;
        const std::lock_guard<std::mutex> lock(mutex);
        wrong.push_back(std::to_string(rank) + " of " + hosts + ", " + std::to_string(numel));
      }
    });
    CHECK(wrong.empty());
    for (const std::string& error : errors) CHECK(error == "");
  }
}

TEST_CASE("a rank that aborts ends the group on all hosts") {
  const auto errors = on_hosts("aabbb", [](int64_t rank, const Group& group) {
    group->barrier()->wait();
    if (rank == 4) group->getBackend(c10::DeviceType::CPU)->abort();
    std::vector<at::Tensor> tensors{at::ones({100})};
    group->allreduce(tensors)->wait();
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, Catch::Contains("the group was aborted (rank 4 of 5)"));
}

}  // namespace trireme
