#include <trireme/memory/bucket_plan.h>

#include <catch_torch.h>

namespace trireme::bucket_plan_test {

namespace {

// Parameters of one letter each, so that a plan can be drawn: "ba|dc" is two buckets, b and a
// travel first.
ParameterInfo parameter(char name, int64_t numel, at::ScalarType dtype = at::kFloat) {
  ParameterInfo info;
  info.name = std::string(1, name);
  info.sizes = {numel};
  info.numel = numel;
  info.dtype = dtype;
  return info;
}

std::vector<int64_t> backwards(size_t count) {
  std::vector<int64_t> order;
  for (size_t i = count; i-- > 0;) order.push_back(static_cast<int64_t>(i));
  return order;
}

struct Drawing {
  std::vector<ParameterInfo> parameters;
  std::vector<int64_t> caps_in_floats;
  std::string trailing;
  std::optional<at::ScalarType> reduce_dtype;

  BucketPlan plan() const {
    BucketPlanRequest request{parameters, backwards(parameters.size()), {}, {}, reduce_dtype};
    for (const ParameterInfo& info : parameters) {
      request.trailing.push_back(trailing.find(info.name) != std::string::npos);
    }
    for (const int64_t cap : caps_in_floats) request.caps.bytes.push_back(cap * 4);
    return make_bucket_plan(request);
  }

  std::string drawn() const {
    std::string picture;
    for (const PlannedBucket& bucket : plan().buckets) {
      if (!picture.empty()) picture += '|';
      for (const BucketSlot& slot : bucket.slots)
        picture += parameters[static_cast<size_t>(slot.parameter)].name;
    }
    return picture;
  }
};

}  // namespace

TEST_CASE("a bucket is closed by the parameter that reaches its cap") {
  const std::vector<ParameterInfo> six = {parameter('a', 4), parameter('b', 4), parameter('c', 4),
                                          parameter('d', 4), parameter('e', 4), parameter('f', 4)};
  CHECK(Drawing{six, {8}, "", {}}.drawn() == "fe|dc|ba");
  CHECK(Drawing{six, {9}, "", {}}.drawn() == "fed|cba");
  CHECK(Drawing{six, {1}, "", {}}.drawn() == "f|e|d|c|b|a");
  CHECK(Drawing{six, {1000}, "", {}}.drawn() == "fedcba");
}

TEST_CASE("the first bucket has its own cap, and a list one per bucket, the last going on") {
  const std::vector<ParameterInfo> six = {parameter('a', 4), parameter('b', 4), parameter('c', 4),
                                          parameter('d', 4), parameter('e', 4), parameter('f', 4)};
  CHECK(Drawing{six, {4, 8}, "", {}}.drawn() == "f|ed|cb|a");
  CHECK(Drawing{six, {4, 12, 8}, "", {}}.drawn() == "f|edc|ba");
}

TEST_CASE("parameters that may stay unused come last, in buckets of their own") {
  const std::vector<ParameterInfo> six = {parameter('a', 4), parameter('b', 4), parameter('c', 4),
                                          parameter('d', 4), parameter('e', 4), parameter('f', 4)};
  CHECK(Drawing{six, {8}, "f", {}}.drawn() == "ed|cb|a|f");
  CHECK(Drawing{six, {8}, "fca", {}}.drawn() == "ed|b|fc|a");
  CHECK(Drawing{six, {8}, "abcdef", {}}.drawn() == "fe|dc|ba");
}

TEST_CASE("dtypes do not share a bucket; buckets go in the order in which they are full") {
  const std::vector<ParameterInfo> mixed = {parameter('a', 4), parameter('b', 4, at::kDouble),
                                            parameter('c', 4), parameter('d', 2, at::kDouble),
                                            parameter('e', 4)};
  // caps of 8 floats = 4 doubles: e and c fill one, d and b the other, a is left over
  CHECK(Drawing{mixed, {8}, "", {}}.drawn() == "ec|db|a");
  SECTION("but they do when they travel in one dtype") {
    CHECK(Drawing{mixed, {1000}, "", at::kHalf}.drawn() == "edcba");
    CHECK(Drawing{mixed, {1000}, "", at::kHalf}.plan().buckets[0].dtype == at::kHalf);
  }
}

TEST_CASE("a sparse gradient travels alone") {
  std::vector<ParameterInfo> three = {parameter('a', 4), parameter('b', 4), parameter('c', 4)};
  three[1].sparse_gradient = true;
  const Drawing drawing{three, {1000}, "", {}};
  CHECK(drawing.drawn() == "b|ca");
  CHECK(drawing.plan().buckets[0].sparse);
}

TEST_CASE("offsets follow each other and scalars and empty tensors have their place") {
  const Drawing drawing{{parameter('a', 3), parameter('b', 0), parameter('c', 1)}, {100}, "", {}};
  const BucketPlan plan = drawing.plan();
  REQUIRE(plan.buckets.size() == 1);
  CHECK((plan.buckets[0].slots == std::vector<BucketSlot>{{2, 0, 1}, {1, 1, 0}, {0, 1, 3}}));
  CHECK(plan.buckets[0].numel == 4);
  CHECK(plan.buckets[0].bytes() == 16);
}

TEST_CASE("parameters left out of the order get no bucket") {
  const std::vector<ParameterInfo> three = {parameter('a', 4), parameter('b', 4),
                                            parameter('c', 4)};
  const BucketPlan plan = make_bucket_plan({three, {2, 0}, {false, false, false}, {{1000}}, {}});
  REQUIRE(plan.buckets.size() == 1);
  CHECK(plan.buckets[0].slots.size() == 2);
  CHECK(make_bucket_plan({three, {}, {false, false, false}, {{1000}}, {}}).buckets.empty());
}

TEST_CASE("plans are values: they compare and print") {
  const Drawing drawing{{parameter('a', 4), parameter('b', 4)}, {4}, "", {}};
  CHECK(drawing.plan() == drawing.plan());
  CHECK_FALSE(drawing.plan() == Drawing{drawing.parameters, {8}, "", {}}.plan());
  CHECK(to_string(drawing.plan(), drawing.parameters) ==
        "bucket 0: 16 bytes Float cpu, 1 gradient: b\n"
        "bucket 1: 16 bytes Float cpu, 1 gradient: a\n");
  CHECK(bucket_label(Drawing{drawing.parameters, {8}, "", {}}.plan(), 0, drawing.parameters) ==
        "bucket 0: b .. a");
}

TEST_CASE("a cap that is no positive number is refused") {
  const std::vector<ParameterInfo> single = {parameter('a', 4)};
  CHECK_THROWS_WITH(make_bucket_plan({single, {0}, {false}, {{0}}, {}}),
                    Catch::Contains("[bucket_plan] got"));
  CHECK_THROWS_WITH(make_bucket_plan({single, {0}, {false}, {{}}, {}}),
                    Catch::Contains("[bucket_plan] got"));
}

}  // namespace trireme::bucket_plan_test
