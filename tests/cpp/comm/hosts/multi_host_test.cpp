#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/host.h>
#include <trireme/comm/hosts/host_layout.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/shm/segment.h>

#include <ATen/ATen.h>
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

namespace trireme::multi_host_test {
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

// What is wrong, by rank, of what each rank says of a communicator over its group.
std::vector<std::string> by_communicator(
    const std::string& hosts,
    const std::function<std::string(const std::shared_ptr<Communicator>&)>& main) {
  std::vector<std::string> said(hosts.size());
  const auto errors = on_hosts(hosts, [&](int64_t rank, const Group& group) {
    said[static_cast<size_t>(rank)] = main(make_communicator(group, nullptr));
  });
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    if (!errors[rank].empty()) said[rank] = "raised " + errors[rank];
  return said;
}

// Makes for each rank a long part, which takes several chunks, a short one and an empty one; of
// unlike sizes, one behind the other.
PartsByRank parts_in(const std::shared_ptr<const shm::Segment>& memory, int64_t world) {
  PartsByRank parts;
  auto* values = reinterpret_cast<int64_t*>(memory->data());
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<at::Tensor>& own = parts.emplace_back();
    for (const int64_t numel : {300'000 + 1000 * rank, 5 + rank, int64_t{0}}) {
      own.push_back(at::from_blob(values, {numel}, [memory](void*) {}, at::kLong));
      values += numel;
    }
  }
  return parts;
}

std::string gather_twice(const std::shared_ptr<Communicator>& communicator) {
  const int64_t world = communicator->world();
  const int64_t bytes = world * 320'000 * 8;
  const HostMemory host = communicator->host()->share_host_memory(bytes, "store");
  if (!host.memory.segment) return host.memory.why_not;
  const PartsByRank parts = parts_in(host.memory.segment, world);
  for (int64_t step = 0; step < 2; ++step) {
    const auto rank = static_cast<size_t>(communicator->rank());
    for (const at::Tensor& own : parts[rank])
      own.copy_(held(static_cast<int64_t>(rank) + step, own.numel()));
    communicator->host()->all_gather_in_host(parts, "step " + std::to_string(step)).wait();
    for (size_t peer = 0; peer < parts.size(); ++peer)
      for (const at::Tensor& part : parts[peer])
        if (!at::equal(part, held(static_cast<int64_t>(peer) + step, part.numel())))
          return "step " + std::to_string(step) + ": part of rank " + std::to_string(peer);
    communicator->barrier("all have looked").wait();
  }
  return std::to_string(host.where.rank) + "/" + std::to_string(host.where.world);
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

TEST_CASE("what ranks of other hosts have comes into the memory of each host") {
  using Said = std::vector<std::string>;
  CHECK(by_communicator("aabb", gather_twice) == Said{"0/2", "1/2", "0/2", "1/2"});
  CHECK(by_communicator("abbb", gather_twice) == Said{"0/1", "0/3", "1/3", "2/3"});
  CHECK(by_communicator("abcab", gather_twice) == Said{"0/2", "0/2", "0/1", "1/2", "1/2"});
  CHECK(by_communicator("aa", gather_twice) == Said{"0/2", "1/2"});  // one host: nothing to bring
}

TEST_CASE("memory that one host cannot have no host has, and the group goes on") {
  const auto said = by_communicator("abb", [](const std::shared_ptr<Communicator>& communicator) {
    const HostMemory none = communicator->host()->share_host_memory(int64_t{1} << 50, "store");
    if (none.memory.segment) return std::string("got it");
    if (communicator->host()->share_memory(64, "all").segment)
      return std::string("got memory over hosts");
    communicator->barrier("still there").wait();
    return none.memory.why_not;
  });
  CHECK(said == std::vector<std::string>(3, said[0]));
  CHECK_THAT(said[0], Catch::Contains("rank 0 says: ") && Catch::Contains("bytes, free are "));
}

TEST_CASE("hosts that ask for different memory, or bring different parts, raise") {
  const auto said = by_communicator("aabb", [](const std::shared_ptr<Communicator>& communicator) {
    std::string text;
    const auto note = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const c10::DistBackendError& error) {
        text += error.what_without_backtrace();
      }
    };
    const int64_t host = communicator->rank() / 2;
    note([&] { communicator->host()->share_host_memory(64 + host, "store"); });
    const HostMemory memory = communicator->host()->share_host_memory(64, "store");
    const PartsByRank none(4);
    note([&] {
      communicator->host()->all_gather_in_host(none, "version " + std::to_string(host)).wait();
    });
    communicator->barrier("still there").wait();
    return text;
  });
  for (const std::string& text : said)
    CHECK_THAT(text, Catch::Contains("share of 64 bytes with root 0 'store'") &&
                         Catch::Contains("share of 65 bytes with root 0 'store'") &&
                         Catch::Contains("'version 0'") && Catch::Contains("'version 1'"));
}

TEST_CASE("a rank that announces its failure ends the group on all hosts at once") {
  const auto errors =
      by_communicator("aabb", [](const std::shared_ptr<Communicator>& communicator) {
        communicator->barrier("before").wait();
        if (communicator->rank() == 3) communicator->announce_failure("its data ran out");
        try {
          communicator->all_reduce({at::ones({100})}, ReduceOp::kSum, "bucket 0").wait();
        } catch (const c10::DistBackendError& error) {
          return std::string(communicator->failure() ? error.what_without_backtrace()
                                                     : "no failure");
        }
        return std::string("went on");
      });
  for (const std::string& error : errors) CHECK_THAT(error, Catch::Contains("its data ran out"));
}

}  // namespace trireme::multi_host_test
