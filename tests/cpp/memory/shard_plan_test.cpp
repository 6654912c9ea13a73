#include <trireme/memory/shard_plan.h>

#include <catch_torch.h>

namespace trireme::shard_plan_test {

namespace {

ParameterInfo parameter(std::string name, std::vector<int64_t> sizes,
                        at::ScalarType dtype = at::kFloat) {
  ParameterInfo info;
  info.name = std::move(name);
  info.numel = 1;
  for (const int64_t size : sizes) info.numel *= size;
  info.sizes = std::move(sizes);
  info.dtype = dtype;
  return info;
}

ShardPlan plan_of(const std::vector<ParameterInfo>& parameters, int64_t world,
                  ShardPlacement placement) {
  return make_shard_plan({parameters, world, placement});
}

// One letter per `step` elements: the digit of the rank that owns them ('?' if not exactly one
// does). Parameters are parted by '|'.
std::string drawn(const ShardPlan& plan, const std::vector<ParameterInfo>& parameters,
                  int64_t step = 1) {
  std::string picture;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i > 0) picture += '|';
    for (int64_t element = 0; element < parameters[i].numel; element += step) {
      std::string owners;
      for (int64_t rank = 0; rank < plan.world; ++rank) {
        const ShardRange& range = plan.of(static_cast<int64_t>(i), rank);
        if (element >= range.begin && element < range.begin + range.numel) {
          owners += std::to_string(rank);
        }
      }
      picture += owners.size() == 1 ? owners : "?";
    }
  }
  return picture;
}

std::string drawn_rows(std::vector<int64_t> sizes, int64_t world) {
  const std::vector<ParameterInfo> single = {parameter("a", std::move(sizes))};
  return drawn(plan_of(single, world, ShardPlacement::kDim0), single);
}

int64_t owned_by(const ShardPlan& plan, int64_t rank) {
  int64_t numel = 0;
  for (const std::vector<ShardRange>& shards : plan.shards) {
    numel += shards[static_cast<size_t>(rank)].numel;
  }
  return numel;
}

}  // namespace

TEST_CASE("rows are dealt as torch.chunk does") {
  CHECK(drawn_rows({6}, 2) == "000111");
  CHECK(drawn_rows({6}, 1) == "000000");
  CHECK(drawn_rows({4, 3}, 2) == "000000111111");
  SECTION("uneven: later ranks get fewer, and the last ones may get none") {
    CHECK(drawn_rows({7}, 2) == "0000111");
    CHECK(drawn_rows({5, 2}, 3) == "0000111122");
    CHECK(drawn_rows({5}, 4) == "00112");
    CHECK(drawn_rows({9}, 6) == "001122334");
  }
  SECTION("fewer rows than ranks") { CHECK(drawn_rows({2, 3}, 4) == "000111"); }
  SECTION("a scalar is rank 0's") { CHECK(drawn_rows({}, 3) == "0"); }
  SECTION("nothing is shared out of nothing") {
    CHECK(drawn_rows({0, 3}, 2).empty());
    CHECK(drawn_rows({3, 0}, 2).empty());
  }
}

TEST_CASE("rows agree with torch.chunk for every small size") {
  for (int64_t rows = 1; rows < 20; ++rows) {
    const std::vector<ParameterInfo> single = {parameter("a", {rows, 3})};
    for (int64_t world = 1; world < 12; ++world) {
      const ShardPlan plan = plan_of(single, world, ShardPlacement::kDim0);
      const std::vector<at::Tensor> chunks = at::arange(rows * 3).reshape({rows, 3}).chunk(world);
      for (int64_t rank = 0; rank < world; ++rank) {
        const ShardRange& range = plan.of(0, rank);
        if (rank >= static_cast<int64_t>(chunks.size())) {
          CHECK(range == ShardRange{});
          continue;
        }
        const at::Tensor& chunk = chunks[static_cast<size_t>(rank)];
        CHECK(range == ShardRange{chunk.storage_offset(), chunk.numel()});
        CHECK(at::IntArrayRef(shard_sizes(single[0], range, plan.placement)) == chunk.sizes());
      }
    }
  }
}

TEST_CASE("flat runs end at multiples of 16 elements, inside parameters and across them") {
  const std::vector<ParameterInfo> three = {parameter("a", {5, 8}), parameter("b", {8}),
                                            parameter("c", {3, 16})};
  // 96 elements, drawn 8 to a letter
  CHECK(drawn(plan_of(three, 1, ShardPlacement::kFlat), three, 8) == "00000|0|000000");
  CHECK(drawn(plan_of(three, 2, ShardPlacement::kFlat), three, 8) == "00000|0|111111");
  CHECK(drawn(plan_of(three, 3, ShardPlacement::kFlat), three, 8) == "00001|1|112222");
  SECTION("a run is rounded up, so the last ranks may have less or nothing") {
    CHECK(drawn(plan_of(three, 4, ShardPlacement::kFlat), three, 8) == "00001|1|112222");
    CHECK(drawn(plan_of(three, 5, ShardPlacement::kFlat), three, 8) == "00001|1|112222");
    CHECK(drawn(plan_of(three, 6, ShardPlacement::kFlat), three, 8) == "00112|2|334455");
  }
  SECTION("elements that no multiple of 16 counts") {
    const std::vector<ParameterInfo> odd = {parameter("a", {7}), parameter("b", {}),
                                            parameter("c", {11})};
    const ShardPlan plan = plan_of(odd, 2, ShardPlacement::kFlat);
    CHECK(drawn(plan, odd) == "0000000|0|00000000111");
    CHECK(plan.of(2, 0) == ShardRange{0, 8});
    CHECK(plan.of(2, 1) == ShardRange{8, 3});
    CHECK(plan.of(0, 1) == ShardRange{});
  }
}

TEST_CASE("flat runs count elements, whatever their dtype") {
  const std::vector<ParameterInfo> mixed = {
      parameter("a", {24}), parameter("b", {24}, at::kBFloat16), parameter("c", {16}, at::kDouble)};
  const ShardPlan plan = plan_of(mixed, 2, ShardPlacement::kFlat);
  CHECK(drawn(plan, mixed, 8) == "000|011|11");
  CHECK(owned_by(plan, 0) == owned_by(plan, 1));
}

TEST_CASE("whole parameters go largest first to the rank that has least") {
  const std::vector<ParameterInfo> five = {parameter("a", {2}), parameter("b", {5}),
                                           parameter("c", {3}), parameter("d", {4}),
                                           parameter("e", {})};
  // b to 0, d to 1, c to 1 (5 | 7), a to 0 (7 | 7), e to 0
  CHECK(drawn(plan_of(five, 2, ShardPlacement::kWhole), five) == "00|00000|111|1111|0");
  CHECK(drawn(plan_of(five, 1, ShardPlacement::kWhole), five) == "00|00000|000|0000|0");
  SECTION("more ranks than parameters") {
    const ShardPlan plan = plan_of(five, 7, ShardPlacement::kWhole);
    CHECK(drawn(plan, five) == "33|00000|222|1111|4");
    CHECK(owned_by(plan, 5) + owned_by(plan, 6) == 0);
  }
  SECTION("bytes decide, not elements") {
    const std::vector<ParameterInfo> mixed = {
        parameter("a", {6}, at::kBFloat16), parameter("b", {2}, at::kDouble), parameter("c", {3})};
    CHECK(drawn(plan_of(mixed, 2, ShardPlacement::kWhole), mixed) == "111111|00|111");
  }
}

TEST_CASE("of equal parameters the earlier goes first, of equal ranks the lower gets it") {
  const std::vector<ParameterInfo> four = {parameter("a", {2}), parameter("b", {2}),
                                           parameter("c", {2}), parameter("d", {2})};
  CHECK(drawn(plan_of(four, 2, ShardPlacement::kWhole), four) == "00|11|00|11");
  CHECK(drawn(plan_of(four, 3, ShardPlacement::kWhole), four) == "00|11|22|00");
}

TEST_CASE("sizes of the tensor that holds a shard") {
  using Sizes = std::vector<int64_t>;
  const ParameterInfo matrix = parameter("a", {5, 2, 3});
  CHECK(shard_sizes(matrix, {0, 12}, ShardPlacement::kDim0) == Sizes{2, 2, 3});
  CHECK(shard_sizes(matrix, {24, 6}, ShardPlacement::kDim0) == Sizes{1, 2, 3});
  CHECK(shard_sizes(matrix, {}, ShardPlacement::kDim0) == Sizes{0, 2, 3});
  CHECK(shard_sizes(matrix, {3, 16}, ShardPlacement::kFlat) == Sizes{16});
  CHECK(shard_sizes(matrix, {}, ShardPlacement::kFlat) == Sizes{0});
  CHECK(shard_sizes(matrix, {0, 30}, ShardPlacement::kWhole) == Sizes{5, 2, 3});
  CHECK(shard_sizes(matrix, {}, ShardPlacement::kWhole) == Sizes{0});

  const ParameterInfo scalar = parameter("b", {});
  CHECK(shard_sizes(scalar, {0, 1}, ShardPlacement::kDim0) == Sizes{});
  CHECK(shard_sizes(scalar, {}, ShardPlacement::kDim0) == Sizes{0});
  CHECK(shard_sizes(scalar, {0, 1}, ShardPlacement::kFlat) == Sizes{1});

  const ParameterInfo empty = parameter("c", {3, 0});
  CHECK(shard_sizes(empty, {}, ShardPlacement::kDim0) == Sizes{3, 0});
  CHECK(shard_sizes(empty, {}, ShardPlacement::kFlat) == Sizes{0});
}

TEST_CASE("parameters of a store begin at multiples of 64 bytes") {
  const std::vector<ParameterInfo> parameters = {
      parameter("a", {17}), parameter("b", {}), parameter("c", {0, 4}),
      parameter("d", {8}, at::kDouble), parameter("e", {33}, at::kBFloat16)};
  const StoreLayout layout = make_store_layout(parameters);
  CHECK(layout.offsets == std::vector<int64_t>{0, 128, 192, 192, 256});
  CHECK(layout.bytes == 384);
  CHECK(make_store_layout({}) == StoreLayout{});
}

TEST_CASE("shard plans are values: they compare and print") {
  const std::vector<ParameterInfo> three = {parameter("a", {2}), parameter("b", {4, 2}),
                                            parameter("c", {})};
  const ShardPlan plan = plan_of(three, 3, ShardPlacement::kDim0);
  CHECK(plan == plan_of(three, 3, ShardPlacement::kDim0));
  CHECK_FALSE(plan == plan_of(three, 3, ShardPlacement::kWhole));
  CHECK_FALSE(plan == plan_of(three, 4, ShardPlacement::kDim0));
  CHECK(to_string(plan, three) ==
        "rank 0: 24 bytes of 3 parameters: a .. c\n"
        "rank 1: 20 bytes of 2 parameters: a .. b\n"
        "rank 2: 0 bytes of 0 parameters\n");
  CHECK(to_string(plan_of(three, 1, ShardPlacement::kWhole), three) ==
        "rank 0: 44 bytes of 3 parameters: a .. c\n");
  const std::vector<ParameterInfo> single = {three[2]};
  CHECK(to_string(plan_of(single, 1, ShardPlacement::kFlat), single) ==
        "rank 0: 4 bytes of 1 parameter: c\n");
}

TEST_CASE("no parameters, and no ranks") {
  for (const ShardPlacement placement :
       {ShardPlacement::kDim0, ShardPlacement::kFlat, ShardPlacement::kWhole}) {
    CHECK(plan_of({}, 2, placement).shards.empty());
    CHECK_THROWS_AS(plan_of({parameter("a", {2})}, 0, placement), c10::ValueError);
    CHECK_THROWS_WITH(plan_of({}, -1, placement),
                      Catch::Contains("[shard_plan] got a world of -1, expected"));
  }
}

}  // namespace trireme::shard_plan_test
