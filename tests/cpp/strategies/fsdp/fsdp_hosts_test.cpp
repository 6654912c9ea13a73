// fully_shard for C++ modules whose ranks are on several hosts: they train as one process does.

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/launch/make_communicator.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/serialize.h>

#include <catch_torch.h>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <thread>
#include <vector>

namespace trireme::fsdp_hosts_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

// What each rank says; rank r is a thread that is on host `hosts[r]`.
template <typename Result>
std::vector<Result> on_hosts(const std::string& hosts,
                             const std::function<Result(ThreadRank&)>& main) {
  const auto world = static_cast<int64_t>(hosts.size());
  std::vector<Result> results(hosts.size());
  std::vector<ThreadRank> ranks(hosts.size());  // alive until all have ended
  std::vector<std::string> errors(hosts.size());
  std::vector<std::thread> threads;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int64_t r = 0; r < world; ++r) {
    threads.emplace_back([&, index = static_cast<size_t>(r)] {
      ThreadRank& rank = ranks[index];
      try {
        at::set_num_threads(1);
        rank.where = {static_cast<int64_t>(index), world};
        rank.group = make_shm_group(store, rank.where,
                                    {.timeout = std::chrono::seconds(20),
                                     .connect_timeout = std::chrono::seconds(20),
                                     .hostname = "127.0.0.1",
                                     .host_partition = hosts.substr(index, 1)});
        rank.communicator = make_communicator(rank.group, store);
        results[index] = main(rank);
      } catch (const std::exception& error) {
        errors[index] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "");
  return results;
}

}  // namespace

TEST_CASE("fully_shard over hosts equals one process") {
  const auto options = AdamWOptions(0.01);
  const Values alone = train_alone<AdamW>(options, 5);
  for (const std::string hosts : {"aabb", "abb"}) {
    const auto of_ranks = on_hosts<Values>(hosts, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 5; ++step) fsdp_step(model, optimizer, step, rank.where);
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : of_ranks) CHECK(count_unlike(values, alone) == 0);
  }
}

TEST_CASE("what one rank saves of parameters that are read in bf16 is all of them in their dtype") {
  const auto told = on_hosts<int64_t>("aab", [](ThreadRank& rank) -> int64_t {
    UnevenNet net;
    const Values before = values_of(net->parameters());
    auto model = fully_shard(
        net, FsdpOptions{.param_dtype = at::kBFloat16, .communicator = rank.communicator});
    std::stringstream file;
    torch::save(model, file);
    UnevenNet plain;
    for (at::Tensor& parameter : plain->parameters()) parameter.detach().zero_();
    torch::load(plain, file);
    return count_unlike(values_of(plain->parameters()), before, 0);
  });
  CHECK(told == std::vector<int64_t>(3, 0));
}

}  // namespace trireme::fsdp_hosts_test
