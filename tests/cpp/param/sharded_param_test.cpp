// Tells which rank owns what of a parameter that a host has once, drawn as pictures.

#include <trireme/param/sharded_param.h>

#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <catch_torch.h>
#include <string>
#include <utility>

namespace trireme::sharded_param_test {

namespace {

// All of a parameter, as it lies in the memory of a host, in its dtype and in param_dtype.
struct Host {
  at::Tensor original;
  at::Tensor cast;
};

Host host_of(const ShardedParamSpec& spec) {
  const auto sizes = stored_info(spec, spec.dtype).sizes;
  Host host{at::zeros(sizes, at::TensorOptions().dtype(spec.dtype)), {}};
  if (spec.is_cast()) host.cast = host.original.to(*spec.param_dtype);
  return host;
}

// Returns what a rank has of the first dimension.
at::Tensor rows_of(const at::Tensor& whole, RankOf where) {
  std::vector<int64_t> sizes = whole.sizes().vec();
  const int64_t most = (sizes.front() + where.world - 1) / where.world;
  const int64_t first = std::min(most * where.rank, sizes.front());
  sizes.front() = std::min(most, sizes.front() - first);
  return range_of(whole, sizes, whole.strides(), first * whole.stride(0));
}

ParamPlace place_of(const ShardedParamSpec& spec, RankOf where, const Host& host) {
  if (spec.is_replicated()) {
    const at::Tensor own = at::zeros({}, at::TensorOptions().dtype(spec.dtype));
    return {own, range_of(own, {}, {}, 0), {}};
  }
  const at::Tensor shard = rows_of(host.original, where);
  if (!spec.is_cast()) return {shard, host.original, {}};
  return {shard, host.cast, rows_of(host.cast, where)};
}

// The ranks of a host, which see one memory.
std::vector<ShardedParam> all_ranks(const ShardedParamSpec& spec, int64_t world, const Host& host) {
  std::vector<ShardedParam> ranks;
  for (int64_t rank = 0; rank < world; ++rank)
    ranks.emplace_back(spec, RankOf{rank, world}, place_of(spec, {rank, world}, host));
  return ranks;
}

ShardedParamSpec spec_of(std::vector<int64_t> sizes, int64_t dim = 0) {
  ShardedParamSpec spec;
  spec.name = "p";
  spec.sizes = std::move(sizes);
  spec.dim = dim;
  return spec;
}

// Each rank fills its shard with its number: what the whole then looks like, rows parted by '|'.
std::string drawn(const ShardedParamSpec& spec, int64_t world) {
  const Host host = host_of(spec);
  const std::vector<ShardedParam> ranks = all_ranks(spec, world, host);
  for (int64_t rank = 0; rank < world; ++rank) {
    const ShardedParam& param = ranks[static_cast<size_t>(rank)];
    param.write_shard(at::full_like(param.sharded(), static_cast<double>(rank)));
  }
  const at::Tensor whole = ranks[0].unsharded();
  const at::Tensor rows = whole.dim() < 2 ? whole.reshape({1, -1}) : whole.flatten(1);
  std::string picture;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    if (row > 0) picture += '|';
    for (int64_t column = 0; column < rows.size(1); ++column)
      picture += std::to_string(rows[row][column].item<int>());
  }
  return picture;
}

std::string sizes_of(const ShardedParamSpec& spec, int64_t world) {
  const Host host = host_of(spec);
  std::string text;
  for (const ShardedParam& param : all_ranks(spec, world, host))
    text += (text.empty() ? "" : " ") + c10::str(param.sharded().sizes());
  return text;
}

}  // namespace

TEST_CASE("dimension 0 is cut by torch.chunk's rule") {
  CHECK(drawn(spec_of({4, 2}), 2) == "00|00|11|11");
  CHECK(drawn(spec_of({5, 2}), 3) == "00|00|11|11|22");
  CHECK(drawn(spec_of({4, 1}), 3) == "0|0|1|1");
  CHECK(drawn(spec_of({7}), 2) == "0000111");
  CHECK(drawn(spec_of({3, 2}), 1) == "00|00|00");
}

TEST_CASE("other dimensions, uneven too") {
  CHECK(drawn(spec_of({2, 4}, 1), 2) == "0011|0011");
  CHECK(drawn(spec_of({2, 5}, 1), 3) == "00112|00112");
  CHECK(drawn(spec_of({1, 2, 3}, 2), 2) == "001001");
}

TEST_CASE("ranks without rows, and parameters without elements, have shards of no elements") {
  CHECK(drawn(spec_of({2, 3}), 4) == "000|111");
  CHECK(sizes_of(spec_of({2, 3}), 4) == "[1, 3] [1, 3] [0, 3] [0, 3]");
  CHECK(sizes_of(spec_of({2, 1}, 1), 2) == "[2, 1] [2, 0]");
  CHECK(sizes_of(spec_of({0, 3}), 2) == "[0, 3] [0, 3]");
  CHECK(sizes_of(spec_of({3, 0}), 2) == "[2, 0] [1, 0]");
}

TEST_CASE("every rank has a scalar of its own") {
  const ShardedParamSpec spec = spec_of({});
  const Host host = host_of(spec);
  const std::vector<ShardedParam> ranks = all_ranks(spec, 2, host);
  ranks[0].write_whole(at::full({}, 3.0));
  ranks[1].write_whole(at::full({}, 4.0));
  CHECK(ranks[0].unsharded().item<float>() == 3);
  CHECK(ranks[1].unsharded().item<float>() == 4);
  CHECK(ranks[1].sharded().data_ptr() == ranks[1].unsharded().data_ptr());
}

TEST_CASE("write_whole takes this rank's part, of any strides") {
  for (const int64_t dim : {0, 1}) {
    const ShardedParamSpec spec = spec_of({5, 3}, dim);
    const Host host = host_of(spec);
    const std::vector<ShardedParam> ranks = all_ranks(spec, 2, host);
    const at::Tensor whole = at::arange(15, at::kFloat).view({3, 5}).t();
    ranks[1].write_whole(whole);
    CHECK_FALSE(at::equal(ranks[0].unsharded(), whole));  // the rest is rank 0's
    ranks[0].write_whole(whole);
    CHECK(at::equal(ranks[0].unsharded(), whole));
    CHECK(at::equal(ranks[1].sharded(), whole.chunk(2, dim)[1]));
  }
}

TEST_CASE("under a param_dtype each rank casts its own part") {
  ShardedParamSpec spec = spec_of({4, 2});
  spec.param_dtype = at::kBFloat16;
  const Host host = host_of(spec);
  const std::vector<ShardedParam> ranks = all_ranks(spec, 2, host);
  const at::Tensor whole = at::arange(8, at::kFloat).view({4, 2}) + 1.0 / 512;
  for (const ShardedParam& param : ranks) param.write_whole(whole);
  ranks[0].cast_own();
  const at::Tensor& unsharded = ranks[1].unsharded();
  CHECK(unsharded.scalar_type() == at::kBFloat16);
  CHECK(at::equal(unsharded.narrow(0, 0, 2), whole.narrow(0, 0, 2).to(at::kBFloat16)));
  CHECK(unsharded.narrow(0, 2, 2).count_nonzero().item<int>() == 0);
  ranks[1].cast_own();
  CHECK(at::equal(unsharded, whole.to(at::kBFloat16)));
  CHECK(at::equal(ranks[1].sharded(), whole.narrow(0, 2, 2)));  // in full
}

TEST_CASE("a shard that was given other memory is noticed, and comes back") {
  const ShardedParamSpec spec = spec_of({4, 2});
  const Host host = host_of(spec);
  const ShardedParam param(spec, RankOf{1, 2}, place_of(spec, {1, 2}, host));
  param.write_shard(at::ones({2, 2}));
  CHECK(param.lies_in_store());
  param.sharded().set_data(at::zeros({2, 2}));
  CHECK_FALSE(param.lies_in_store());
  param.return_to_store();
  CHECK(param.lies_in_store());
  CHECK(at::equal(param.sharded(), at::ones({2, 2})));
}

}  // namespace trireme::sharded_param_test
