// Plans say what lies in which block, and where in memory; who works; what is refused in words.

#include <trireme/strategies/parameter_server/table_memory.h>

#include <strategies/parameter_server/ps_ranks.h>
#include <vector>

namespace trireme::table_plan_test {

using namespace trireme::test;
using ps::Roles;

namespace {

std::vector<ParameterInfo> three_tensors() {
  ParameterInfo large, empty, half;
  large.name = "large";
  large.sizes = {70000};
  large.numel = 70000;
  empty.name = "empty";
  empty.sizes = {0, 3};
  half.name = "half";
  half.sizes = {5};
  half.numel = 5;
  half.dtype = at::kBFloat16;
  return {large, empty, half};
}

std::string wrong(const ps::Options& options, int64_t workers = 2) {
  return complaint_about(options, workers);
}

}  // namespace

TEST_CASE("tensors are cut into blocks of at most 32768 elements") {
  const auto tensors = three_tensors();
  const ps::TablePlan plan = ps::make_table_plan({tensors, 2, 3, true});
  CHECK(to_string(plan, tensors) ==
        "block 0: 'large'[0, 32768)\n"
        "block 1: 'large'[32768, 65536)\n"
        "block 2: 'large'[65536, 70000)\n"
        "block 3: 'half'[0, 5)\n");
}

TEST_CASE("parts of a table lie behind each other in lines of 64 bytes") {
  const auto tensors = three_tensors();
  const ps::TablePlan plan = ps::make_table_plan({tensors, 2, 3, true});
  CHECK(plan.blocks_at == 64);
  CHECK(plan.marks_at == 64 + 4 * 64);
  CHECK(plan.mark_bytes == 64 + 64);  // a worker has 2 halves of 3 numbers behind its line
  const int64_t states = plan.marks_at + 3 * plan.mark_bytes;
  // States are fp32: 280000 bytes, none, and 20 of bf16's 5 elements.
  CHECK(plan.state_at == std::vector<int64_t>{states, states + 280000, states + 280000,
                                              states + 280064, states + 560064, states + 560064});
  CHECK(plan.half_bytes == 280000 + 64);
  CHECK(plan.deposits_at == states + 2 * 280064);
  CHECK(plan.bytes == plan.deposits_at + 3 * 2 * plan.half_bytes);
  const ps::TablePlan loose = ps::make_table_plan({tensors, 0, 3, false});
  CHECK(loose.bytes == loose.marks_at + 3 * loose.mark_bytes);
}

TEST_CASE("the last ranks serve, or those that are named") {
  CHECK(ps::roles_of({}, {0, 3}) == Roles{{0, 1, 2}, {}});
  CHECK(ps::roles_of({1}, {0, 3}) == Roles{{0, 1}, {2}});
  CHECK(ps::roles_of({0, {2, 0}}, {0, 4}) == Roles{{1, 3}, {0, 2}});
  CHECK_THROWS_WITH(ps::roles_of({3}, {0, 3}), Catch::Contains("got 3 servers among 3 ranks"));
  CHECK_THROWS_WITH(ps::roles_of({-1}, {0, 3}),
                    Catch::Contains("got servers=-1, expected 0 or more"));
  CHECK_THROWS_WITH(ps::roles_of({0, {3}}, {0, 3}), Catch::Contains("got rank 3 as a server"));
  CHECK_THROWS_WITH(ps::roles_of({0, {1, 1}}, {0, 3}), Catch::Contains("got rank 1 twice"));
}

TEST_CASE("options that say nothing together are named") {
  CHECK(wrong({}).empty());
  CHECK(wrong({.mode = ps::Mode::kSsp, .staleness = 3}).empty());
  CHECK(wrong({.staleness = -1}) == "staleness=-1, expected >= 0");
  CHECK_THAT(wrong({.staleness = 1}), Catch::Contains("staleness=1 under mode='bsp'"));
  CHECK_THAT(wrong({.mode = ps::Mode::kAsync, .staleness = 1}), Catch::Contains("'async'"));
  CHECK_THAT(wrong({.mode = ps::Mode::kSsp, .backup = 1}), Catch::Contains("backup=1 under mode"));
  CHECK_THAT(wrong({.backup = 2}), Catch::Contains("backup=2, expected one in [0, 2)"));
  CHECK_THAT(wrong({.backup = 1}, 49), Catch::Contains("expected at most 48 workers"));
  CHECK_THAT(wrong({.timeout = std::chrono::milliseconds(0)}), Catch::Contains("timeout=0 ms"));
}

TEST_CASE("tables that cannot be are named") {
  const auto of = [](const ps::TableSpec& table) {
    return ps::complaint_about({table}, ps::Mode::kBsp);
  };
  CHECK(of(zeros_table("t", 3, ps::SGD{})).empty());
  CHECK_THAT(of(zeros_table("", 3, ps::SGD{})), Catch::Contains("without a name"));
  CHECK_THAT(of(ps::dense("t", ps::NamedTensors(), ps::SGD{})), Catch::Contains("no tensors"));
  CHECK_THAT(of(ps::dense("t", named_x(at::zeros({2}, at::kLong)), ps::SGD{})),
             Catch::Contains("table 't' with 'x' of dtype int64"));
  CHECK_THAT(of(zeros_table("t", 3, ps::SGD{.lr = -1})),
             Catch::Contains("got SGD(lr=-1, momentum=0, weight_decay=0), expected lr >= 0"));
  CHECK_THAT(of(zeros_table("t", 3, ps::SGD{}, {.staleness = 2})),
             Catch::Contains("staleness=2 under mode='bsp'"));
  const auto table = zeros_table("t", 3, ps::SGD{});
  CHECK_THAT(ps::complaint_about({table, table}, ps::Mode::kBsp),
             Catch::Contains("two tables of the name 't'"));
  const torch::nn::Linear layer(2, 2);
  CHECK_THAT(
      ps::complaint_about({ps::dense("a", layer, ps::SGD{}), ps::dense("b", layer, ps::SGD{})},
                          ps::Mode::kBsp),
      Catch::Contains("'weight' of table 'b' in another table as well"));
  CHECK_THAT(ps::complaint_about({}, ps::Mode::kBsp), Catch::Contains("no tables"));
}

}  // namespace trireme::table_plan_test
