// Parameters of a unit that ranks gather: what comes, where it lies, and when it is gone.

#include <trireme/param/gathered_params.h>

#include <trireme/memory/buffer_pool.h>
#include <trireme/param/param_group.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <param/kinds_of_params.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::gathered_params_test {

using trireme::test::all_kinds;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::value_of;

namespace {

using Strings = std::vector<std::string>;

ParamGroup gathering(const ThreadRank& rank, std::vector<ShardedParamSpec> specs) {
  ParamGroupRequest request{std::move(specs), rank.communicator};
  request.always_gathers = true;  // with one rank, too
  return ParamGroup(std::move(request));
}

// Names of parameters that are not `times` their values.
std::string unlike(const ParamGroup& group, int64_t times) {
  std::string names;
  for (const ShardedParam& param : group.params()) {
    const ShardedParamSpec& spec = param.spec();
    const auto dtype = spec.param_dtype.value_or(spec.dtype);
    if (!at::equal(param.unsharded(), value_of(spec, times).to(dtype))) names += spec.name + " ";
  }
  return names;
}

void write(const ParamGroup& group, int64_t times) {
  for (const ShardedParam& param : group.params()) param.write_whole(value_of(param.spec(), times));
}

void gather(ParamGroup& group) {
  group.unshard();
  group.wait_for_unshard();
}

}  // namespace

TEST_CASE("every rank gets all of every parameter, again after writes") {
  for (const int64_t world : {1, 2, 3, 4}) {
    Strings heard(static_cast<size_t>(world));
    run_thread_ranks(world, [&](ThreadRank& rank) {
      ParamGroup group = gathering(rank, all_kinds());
      std::string& said = heard[static_cast<size_t>(rank.where.rank)];
      write(group, 1);
      gather(group);
      said += unlike(group, 1);
      write(group, 2);
      gather(group);  // it is there, and must be newer
      said += unlike(group, 2);
      group.reshard();
      write(group, 3);
      gather(group);
      said += unlike(group, 3);
    });
    CAPTURE(world);
    for (const std::string& said : heard) CHECK(said == "");
  }
}

TEST_CASE("shards are torch.chunk's, each in a storage of its own") {
  Strings heard(3);
  run_thread_ranks(3, [&](ThreadRank& rank) {
    const ParamGroup group = gathering(rank, all_kinds());
    write(group, 1);
    const int64_t own = rank.where.rank;
    for (const ShardedParam& param : group.params()) {
      const ShardedParamSpec& spec = param.spec();
      at::Tensor expected = value_of(spec, 1);
      if (!spec.sizes.empty()) {
        const auto chunks = expected.chunk(3, spec.dim);
        const auto count = static_cast<int64_t>(chunks.size());
        expected = own < count ? chunks[static_cast<size_t>(own)] : expected.narrow(spec.dim, 0, 0);
      }
      const at::Tensor& shard = param.sharded();
      if (!at::equal(shard, expected) || shard.storage().nbytes() != shard.nbytes())
        heard[static_cast<size_t>(own)] += spec.name + " ";
    }
  });
  for (const std::string& said : heard) CHECK(said == "");
}

TEST_CASE("while released nothing takes memory; the tensors stay the same") {
  bool had_none = true, same_tensors = true, same_address = true;
  int64_t taken = 0, left = -1;
  run_thread_ranks(2, [&](ThreadRank& rank) {
    ParamGroup group = gathering(rank, all_kinds());
    const auto pool = std::make_shared<BufferPool>(c10::kCPU);
    group.memory().share_pool(pool);
    write(group, 1);
    const at::Tensor whole = group.params()[0].unsharded();
    const bool none_before = whole.storage().nbytes() == 0 && !group.has_unsharded();
    gather(group);
    const void* address = whole.const_data_ptr();
    const int64_t taken_now = pool->taken_bytes();
    const bool is_same = group.params()[0].unsharded().is_same(whole);
    group.reshard();
    const bool none_after = whole.storage().nbytes() == 0 && !group.has_unsharded();
    const int64_t left_now = pool->taken_bytes();
    gather(group);
    if (rank.where.rank != 0) return;
    had_none = none_before && none_after;
    same_tensors = is_same;
    same_address = whole.const_data_ptr() == address;  // warm pages
    taken = taken_now;
    left = left_now;
  });
  CHECK(had_none);
  CHECK(same_tensors);
  CHECK(same_address);
  CHECK(taken >= (12 * 2 + 5 * 2 + 2 + 3 * 5 * 2) * 4);
  CHECK(left == 0);
}

TEST_CASE("all of a parameter can be read beside, in its own dtype") {
  Strings heard(3);
  run_thread_ranks(3, [&](ThreadRank& rank) {
    ParamGroup group = gathering(rank, all_kinds());
    write(group, 1);
    for (size_t i = 0; i < group.params().size(); ++i) {
      const ShardedParam& param = group.params()[i];
      const at::Tensor whole = param.along_dim(group.memory().read_whole(static_cast<int64_t>(i)));
      if (!at::equal(whole, value_of(param.spec(), 1)) || group.has_unsharded())
        heard[static_cast<size_t>(rank.where.rank)] += param.spec().name + " ";
    }
  });
  for (const std::string& said : heard) CHECK(said == "");
}

TEST_CASE("a gather that fails names the unit, and what it had is not there") {
  std::string said;
  bool is_there = true;
  run_thread_ranks(2, [&](ThreadRank& rank) {
    ParamGroup group = gathering(rank, {{"a.weight", {4}}, {"a.bias", {2}}});
    if (rank.where.rank == 1) {
      rank.communicator->announce_failure("[test] rank 1 went home");
      return;
    }
    said = trireme::test::error_of([&] { gather(group); });
    is_there = group.has_unsharded();
  });
  CHECK_THAT(said, Catch::Contains("all_gather of unit a.weight .. a.bias"));
  CHECK_FALSE(is_there);
}

}  // namespace trireme::gathered_params_test
