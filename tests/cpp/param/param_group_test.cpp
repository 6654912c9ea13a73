// Parameters of a unit in one memory for all ranks: what changed in it, and who is shown what.

#include <trireme/param/param_group.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::param_group_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

// Notes what it is told.
class NotingFace final : public ModuleFace {
 public:
  void show(bool unsharded) const override { shown += unsharded ? 'u' : 's'; }
  bool requires_grad(size_t parameter) const override { return parameter == 0; }
  mutable std::string shown;
};

ShardedParamSpec spec_of(std::string name, std::vector<int64_t> sizes) {
  ShardedParamSpec spec;
  spec.name = std::move(name);
  spec.sizes = std::move(sizes);
  return spec;
}

std::vector<ShardedParamSpec> two() { return {spec_of("a", {5, 2}), spec_of("b", {3})}; }

std::vector<at::Tensor> leaves_of(const ParamGroup& group) {
  std::vector<at::Tensor> leaves;
  for (const ShardedParam& param : group.params()) leaves.push_back(param.unsharded().detach());
  return leaves;
}

void on_shm(int64_t world, const std::function<void(ThreadRank&)>& main) {
  run_thread_ranks(world, main, std::chrono::seconds(30), Engine::kShm);
}

}  // namespace

TEST_CASE("what one rank writes into its shard all ranks read in the whole") {
  std::vector<at::Tensor> seen(3);
  on_shm(3, [&](ThreadRank& rank) {
    ParamGroup group({two(), rank.communicator});
    for (const ShardedParam& param : group.params())
      param.write_shard(at::full_like(param.sharded(), static_cast<double>(rank.where.rank)));
    rank.communicator->barrier("written").wait();
    seen[static_cast<size_t>(rank.where.rank)] = group.params()[0].unsharded().clone();
    rank.communicator->barrier("read").wait();
  });
  const at::Tensor rows = at::tensor({0.F, 0.F, 1.F, 1.F, 2.F});
  for (const at::Tensor& tensor : seen) CHECK(at::equal(tensor, rows.view({5, 1}).expand({5, 2})));
}

TEST_CASE("a face is told once that it changes, and says who requires gradients") {
  const auto face = std::make_shared<NotingFace>();
  std::vector<at::Tensor> leaves;
  on_shm(1, [&](ThreadRank& rank) {
    ParamGroup group({two(), rank.communicator});
    leaves = leaves_of(group);
    group.set_face(face, leaves);
    group.reshard();
    group.unshard();  // where nothing is gathered it changes nothing
    group.show_unsharded();
    group.show_unsharded();
    group.show_sharded();
    group.reshard();
    group.show_unsharded();
    group.follow_requires_grad();
  });
  CHECK(face->shown == "usu");
  CHECK(leaves[0].requires_grad());
  CHECK_FALSE(leaves[1].requires_grad());
}

TEST_CASE("writes into shards are noticed, by parameter; casts and the writes of others are none") {
  using Changes = std::vector<std::vector<int64_t>>;
  Changes changes;
  int64_t bumps = 0;
  on_shm(1, [&](ThreadRank& rank) {
    std::vector<ShardedParamSpec> specs = two();
    specs[0].param_dtype = at::kBFloat16;
    ParamGroup group({std::move(specs), rank.communicator});
    group.set_face(std::make_shared<NotingFace>(), leaves_of(group));
    const auto note = [&] { changes.push_back(group.changed_outside()); };
    group.params()[1].write_shard(at::ones({3}));
    note();  // before the first finish_writes()
    group.finish_writes();
    note();
    const int64_t before = group.leaves()[1]._version();
    group.bump_unsharded();
    bumps = group.leaves()[1]._version() - before;
    note();
    group.params()[1].write_shard(at::zeros({3}));
    note();
    group.finish_writes();
    note();
  });
  CHECK(changes == Changes{{}, {}, {}, {1}, {}});
  CHECK(bumps == 1);
}

TEST_CASE("ranks that share memory gather nothing; a group of nothing is refused") {
  std::string nothing;
  bool gathers = true, is_there = false;
  on_shm(2, [&](ThreadRank& rank) {
    ParamGroup group({two(), rank.communicator});
    if (rank.where.rank == 1) return;
    gathers = group.gathers();
    is_there = group.has_unsharded() && group.store() != nullptr;
  });
  on_shm(1, [&](ThreadRank& rank) {
    nothing = error_of<c10::ValueError>([&] { ParamGroup({{}, rank.communicator}); });
  });
  CHECK_FALSE(gathers);
  CHECK(is_there);
  CHECK_THAT(nothing, Catch::Contains("[fully_shard] got a group without parameters"));
}

}  // namespace trireme::param_group_test
