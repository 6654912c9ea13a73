#include <trireme/comm/agree.h>

#include <trireme/comm/gather_texts.h>

#include <array>
#include <catch_torch.h>
#include <thread_ranks.h>

namespace trireme::agree_test {

using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

TEST_CASE("the first complaint is that of the lowest rank") {
  CHECK(as_complaint("").empty());
  CHECK_FALSE(first_complaint({"a", "", "no!"}));
  const auto found = first_complaint({"a", as_complaint("no data"), as_complaint("no disk")});
  REQUIRE(found);
  CHECK(found->rank == 1);
  CHECK(found->text == "no data");
}

TEST_CASE("the first difference is a line of the lowest rank that differs from rank 0") {
  CHECK_FALSE(first_difference({"a\nb", "a\nb"}));
  CHECK_FALSE(first_difference({}));
  const auto other = first_difference({"a\nb\nc", "a\nb\nc", "a\nx\nc", "z"});
  REQUIRE(other);
  CHECK(other->rank == 2);
  CHECK(other->first == "b");
  CHECK(other->other == "x");

  const auto shorter = first_difference({"a\nb", "a"});
  REQUIRE(shorter);
  CHECK(shorter->first == "b");
  CHECK(shorter->other == "nothing more");
  const auto longer = first_difference({"", "a"}, "no line");
  REQUIRE(longer);
  CHECK(longer->first == "no line");
  CHECK(longer->other == "a");
}

TEST_CASE("ranks compare texts by a number, and hear of a flag") {
  std::array<std::array<Comparison, 3>, 2> found;
  std::array<std::string, 2> texts;
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const auto compare = [&](const std::string& text, bool flag) {
      return compare_texts({text, "texts", flag}, *rank.communicator, at::kCPU);
    };
    const auto number = static_cast<size_t>(rank.where.rank);
    const bool is_last = number == 1;
    found[number] = {compare("a", false), compare("a", is_last),
                     compare(is_last ? "b" : "a", false)};
    for (const std::string& of_last : {std::string("from\0rank 1", 11), std::string()})
      texts[number] +=
          broadcast_text(is_last ? of_last : "mine", 1, *rank.communicator, at::kCPU) + ".";
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(found[rank][0].are_equal);
    CHECK_FALSE(found[rank][0].any_flag);
    CHECK(found[rank][1].are_equal);
    CHECK(found[rank][1].any_flag);
    CHECK_FALSE(found[rank][2].are_equal);
    CHECK_FALSE(found[rank][2].any_flag);
    CHECK(texts[rank] == std::string("from\0rank 1..", 13));
  }
}

}  // namespace trireme::agree_test
