// Parameters that ranks share: ranks as threads, each with a mapping of its own.

#include <trireme/memory/host_store.h>

#include <trireme/comm/host.h>
#include <trireme/shm/segment.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>

#include <catch_torch.h>
#include <functional>
#include <memory/parameter.h>
#include <sstream>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::host_store_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::parameter;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

std::vector<ParameterInfo> mixed_parameters() {
  return {parameter({7, 3}),
          parameter({}),
          parameter({0, 4}),
          parameter({5, 11}, at::kDouble),
          parameter({6, 9}, at::kBFloat16),
          parameter({1}, at::kHalf),
          parameter({3, 5}, at::kComplexFloat),
          parameter({300, 20})};
}

// Small integers, another sequence for each parameter.
at::Tensor values_of(size_t index, const ParameterInfo& info) {
  const at::Tensor values = (at::arange(info.numel) + static_cast<int64_t>(index)) % 120;
  return values.view(info.sizes).to(info.dtype);
}

// The store of one rank, alone.
std::shared_ptr<HostStore> store_of(std::vector<ParameterInfo> parameters) {
  auto segment = std::make_shared<const shm::Segment>(
      shm::Segment::create(shm::SegmentKind::kAnonymous, HostStore::bytes_for(parameters, 1)));
  return HostStore::make(std::move(segment), std::move(parameters), {0, 1});
}

std::vector<at::Tensor> wholes(const HostStore& store) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < store.parameters().size(); ++i)
    tensors.push_back(store.whole(static_cast<int64_t>(i)));
  return tensors;
}

void run_stores(int64_t world,
                const std::function<void(ThreadRank&, std::shared_ptr<HostStore>)>& rank_main) {
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        const auto parameters = mixed_parameters();
        const int64_t bytes = HostStore::bytes_for(parameters, world);
        auto memory = rank.communicator->host()->share_memory(bytes, "store");
        rank_main(rank, HostStore::make(std::move(memory.segment), parameters, rank.where));
      },
      std::chrono::seconds(30), Engine::kShm);
}

}  // namespace

TEST_CASE("a store is a line per rank and the layout") {
  const std::vector<ParameterInfo> parameters{parameter({3}), parameter({20}), parameter({1})};
  //   | 4 lines | p | pp | p |
  CHECK(HostStore::bytes_for(parameters, 4) == (4 + 1 + 2 + 1) * 64);
  CHECK(HostStore::bytes_for({}, 2) == 2 * 64);
}

TEST_CASE("what each owner writes into its shards all ranks see as whole parameters") {
  for (const auto placement :
       {ShardPlacement::kDim0, ShardPlacement::kFlat, ShardPlacement::kWhole}) {
    for (const int64_t world : {1, 2, 3}) {
      std::vector<int> wrong(static_cast<size_t>(world));
      run_stores(world, [&](ThreadRank& rank, const std::shared_ptr<HostStore>& store) {
        const auto& parameters = store->parameters();
        const ShardPlan plan = make_shard_plan({parameters, world, placement});
        const std::vector<at::Tensor> tensors = wholes(*store);
        int& found = wrong[static_cast<size_t>(rank.where.rank)];
        for (const at::Tensor& tensor : tensors) found += tensor.count_nonzero().item<int>() != 0;
        rank.communicator->barrier("before writing").wait();
        for (size_t i = 0; i < parameters.size(); ++i) {
          const auto& range = plan.of(static_cast<int64_t>(i), rank.where.rank);
          const at::Tensor shard = store->shard(static_cast<int64_t>(i), range,
                                                shard_sizes(parameters[i], range, placement));
          found += shard.storage().nbytes() != shard.nbytes();
          const at::Tensor values = values_of(i, parameters[i]).view(-1);
          shard.copy_(values.narrow(0, range.begin, range.numel).view(shard.sizes()));
        }
        rank.communicator->barrier("after writing").wait();
        for (size_t i = 0; i < parameters.size(); ++i)
          found += !at::equal(tensors[i], values_of(i, parameters[i]));
      });
      CHECK(wrong == std::vector<int>(static_cast<size_t>(world)));
    }
  }
}

TEST_CASE("a tensor over the store spans its parameter and no more, at a line of its own") {
  const auto store = store_of(mixed_parameters());
  for (size_t i = 0; i < store->parameters().size(); ++i) {
    const ParameterInfo& info = store->parameters()[i];
    const at::Tensor tensor = store->whole(static_cast<int64_t>(i));
    CHECK(tensor.sizes() == at::IntArrayRef(info.sizes));
    CHECK(tensor.scalar_type() == info.dtype);
    CHECK(tensor.is_contiguous());
    CHECK(tensor.storage().nbytes() == tensor.nbytes());
    CHECK_FALSE(tensor.storage().resizable());
    CHECK(reinterpret_cast<uintptr_t>(tensor.storage().data()) % 64 == 0);
  }
}

TEST_CASE("what is saved of a shard is the shard") {
  const auto store = store_of({parameter({4096, 256})});
  const at::Tensor shard = store->shard(0, {256 * 100, 256 * 8}, {8, 256});
  const at::Tensor values = at::arange(8 * 256).view({8, 256}).to(at::kFloat);
  shard.copy_(values);
  constexpr size_t kRoom = 4096;  // for what a file says besides

  std::stringstream file;
  torch::save(shard, file);
  CHECK(file.str().size() < shard.nbytes() + kRoom);
  at::Tensor loaded;
  torch::load(loaded, file);
  CHECK(at::equal(loaded, values));

  const std::vector<char> pickled = torch::pickle_save(shard);
  CHECK(pickled.size() < shard.nbytes() + kRoom);
  loaded = torch::pickle_load(pickled).toTensor();
  CHECK(at::equal(loaded, values));
  loaded.zero_();
  CHECK(at::equal(store->whole(0).narrow(0, 100, 8), values));
}

TEST_CASE("a tensor keeps the memory after the store, the group and the peers are gone") {
  std::vector<at::Tensor> kept(2);
  std::weak_ptr<HostStore> weak;
  run_stores(2, [&](ThreadRank& rank, const std::shared_ptr<HostStore>& store) {
    if (rank.where.rank == 0) weak = store;
    kept[static_cast<size_t>(rank.where.rank)] = store->whole(7);
  });
  kept[0].fill_(3);
  CHECK(kept[1].sum().item<double>() == 3 * 300 * 20);
  CHECK_FALSE(weak.expired());
  kept.clear();
  CHECK(weak.expired());
}

TEST_CASE("a parameter that lies elsewhere, or otherwise, is not held") {
  const auto store = store_of({parameter({4, 4}), parameter({4, 4}), parameter({0})});
  at::Tensor weight = store->whole(0).set_requires_grad(true);
  CHECK(store->holds(0, weight));
  CHECK(store->holds(0, weight.detach()));
  CHECK_FALSE(store->holds(1, weight));
  CHECK_FALSE(store->holds(0, weight.to(at::kDouble)));
  CHECK_FALSE(store->holds(0, weight.detach().t()));
  CHECK_FALSE(store->holds(0, weight.detach().narrow(0, 0, 2)));
  CHECK_FALSE(store->holds(0, weight.detach().view(at::kInt)));
  CHECK_FALSE(store->holds(0, at::empty({4, 4}, at::kMeta)));
  CHECK_FALSE(store->holds(0, at::Tensor()));
  CHECK(store->holds(2, at::empty({0})));
  weight.set_data(weight.detach().clone());
  CHECK_FALSE(store->holds(0, weight));
  weight.set_data(store->whole(0));
  CHECK(store->holds(0, weight));
}

TEST_CASE("a version is complete when every rank has published it") {
  std::vector<uint64_t> before(2, 9), during(2, 9), after(2, 9);
  std::string backwards;
  run_stores(2, [&](ThreadRank& rank, const std::shared_ptr<HostStore>& store) {
    const auto own = static_cast<size_t>(rank.where.rank);
    before[own] = store->version();
    rank.communicator->barrier("all have looked").wait();
    if (own == 1) store->publish_version(1);
    rank.communicator->barrier("one has published").wait();
    during[own] = store->version() + 10 * store->version_of(1);
    rank.communicator->barrier("all have looked again").wait();
    if (own == 0) store->publish_version(1);
    rank.communicator->barrier("both have published").wait();
    after[own] = store->version();
    if (own == 0) backwards = error_of<c10::Error>([&] { store->publish_version(0); });
  });
  CHECK(before == std::vector<uint64_t>{0, 0});
  CHECK(during == std::vector<uint64_t>{10, 10});
  CHECK(after == std::vector<uint64_t>{1, 1});
  CHECK_THAT(backwards, Catch::Contains("INTERNAL ASSERT"));
}

TEST_CASE("writes in place are found by parameter, those that autograd does not count are not") {
  using Indices = std::vector<int64_t>;
  const auto store = store_of({parameter({4}), parameter({4, 2}), parameter({2}), parameter({3})});
  std::vector<at::Tensor> weights = wholes(*store);
  for (const at::Tensor& weight : weights) weight.set_requires_grad(true);
  weights[3] = at::Tensor();  // one that this rank does not look at
  CHECK(store->changed_outside(weights) == Indices{});
  store->snapshot_versions(weights);
  const at::NoGradGuard no_grad;
  CHECK(store->changed_outside(weights) == Indices{});

  weights[0].variable_data().fill_(2);
  store->shard(1, {0, 4}, {2, 2}).fill_(2);
  CHECK(store->changed_outside(weights) == Indices{});
  weights[2].add_(1);
  CHECK(store->changed_outside(weights) == Indices{2});
  weights[1].narrow(0, 1, 2).detach().zero_();
  CHECK(store->changed_outside(weights) == Indices{1, 2});
  store->snapshot_versions(weights);
  CHECK(store->changed_outside(weights) == Indices{});
}

TEST_CASE("a graph kept over a write of another rank raises once it is counted") {
  const auto store = store_of({parameter({4})});
  const at::Tensor weight = store->whole(0).fill_(1).set_requires_grad(true);
  const auto loss_of = [&] { return (weight * weight).sum(); };
  const at::Tensor kept = loss_of();
  const int64_t version = weight._version();
  store->shard(0, {0, 4}, {4}).fill_(5);
  HostStore::bump_versions({weight, at::Tensor()});
  CHECK(weight._version() == version + 1);
  CHECK_THAT(error_of<c10::Error>([&] { torch::autograd::backward({kept}, {}); }),
             Catch::Contains("modified by an inplace operation"));
  torch::autograd::backward({loss_of()}, {});
  CHECK(weight.grad().sum().item<double>() == 40);
}

TEST_CASE("a store takes CPU parameters that fit, and ranges inside of them") {
  auto segment =
      std::make_shared<const shm::Segment>(shm::Segment::create(shm::SegmentKind::kAnonymous, 127));
  CHECK_THAT(error_of<c10::ValueError>([&] { HostStore::make(segment, {parameter({1})}, {0, 1}); }),
             Catch::Contains("[host_store] got a mapping of 127 bytes, 1 parameters need 128 (rank "
                             "0 of 1)"));
  CHECK_THAT(error_of<c10::ValueError>([&] { HostStore::make(nullptr, {}, {0, 1}); }),
             Catch::Contains("got a mapping of 0 bytes"));
  ParameterInfo on_gpu = parameter({0});
  on_gpu.device = c10::Device(c10::kCUDA, 1);
  CHECK_THAT(error_of<c10::ValueError>([&] { HostStore::make(segment, {on_gpu}, {0, 1}); }),
             Catch::Contains("got parameter p on cuda:1, expected CPU memory"));

  const auto store = store_of({parameter({10})});
  for (const auto& [range, numel] : std::vector<std::pair<ShardRange, int64_t>>{
           {{0, 11}, 11}, {{5, 6}, 6}, {{-1, 2}, 2}, {{0, 4}, 5}}) {
    CHECK_THAT(error_of<c10::ValueError>(
                   [&, &range = range, &numel = numel] { store->shard(0, range, {numel}); }),
               Catch::Contains("but p has 10"));
  }
}

}  // namespace trireme::host_store_test
