#include <trireme/comm/name_book.h>

#include <catch_torch.h>
#include <string>
#include <utility>
#include <vector>

using trireme::AgreedOperation;
using trireme::NameBook;
using trireme::NamedOperation;

namespace name_book_test {
namespace {

const NameBook::Clock::time_point kNow{};

NamedOperation allreduce(const std::string& name, const std::string& shape = "[3]") {
  return {name, NameBook::kAllRanks, "allreduce", {{"shape", shape}}, "", true};
}

NamedOperation of_kind(const std::string& kind, const std::string& name, int64_t set = 0) {
  return {name, set, kind, {}, "", false};
}

std::vector<NameBook::Decision> say(NameBook& book, int64_t rank, NamedOperation operation) {
  return book.announce(rank, std::move(operation), kNow);
}

NamedOperation joined() { return of_kind(NameBook::kJoin, "join"); }

TEST_CASE("An operation is decided when the last rank has named it", "[name_book]") {
  NameBook book(3);
  CHECK(say(book, 1, allreduce("a")).empty());
  CHECK(say(book, 0, allreduce("b")).empty());
  CHECK(say(book, 0, allreduce("a")).empty());
  const auto decided = say(book, 2, allreduce("a"));
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.name == "a");
  CHECK(decided[0].agreed.error.empty());
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 1, 2});
  REQUIRE(book.waiting().size() == 1);
  CHECK(book.waiting()[0].operation.name == "b");
  CHECK(book.waiting()[0].issued == std::vector<int64_t>{0});
  CHECK(book.waiting()[0].missing == std::vector<int64_t>{1, 2});
}

TEST_CASE("Ranks hear who has joined, and tell what they begin meanwhile", "[name_book]") {
  NameBook book(3);
  NamedOperation begun = of_kind(NameBook::kBegun, "1");
  begun.payload = "7";
  CHECK(say(book, 0, begun).empty());
  auto decided = say(book, 1, joined());
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.kind == NameBook::kHasJoined);
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 2});
  decided = say(book, 0, begun);
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.payload == "7");
  CHECK(decided[0].ranks == std::vector<int64_t>{1});
  CHECK(book.waiting().empty());
  CHECK(say(book, 2, joined())[0].ranks == std::vector<int64_t>{0});
  CHECK(say(book, 0, joined())[0].agreed.operation.kind == NameBook::kJoin);
  CHECK(say(book, 0, begun).empty());
}

TEST_CASE("Payloads come in the order of the ranks of a set", "[name_book]") {
  NameBook book(4);
  CHECK(book.define_set(7, {1, 3}).empty());
  NamedOperation gather = of_kind("allgather", "a", 7);
  gather.payload = "three";
  CHECK(say(book, 3, gather).empty());
  gather.payload = "one";
  const auto decided = say(book, 1, gather);
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.payloads == std::vector<std::string>{"one", "three"});
  CHECK(decided[0].ranks == std::vector<int64_t>{1, 3});
}

TEST_CASE("An operation of a set waits until the set is known", "[name_book]") {
  NameBook book(2);
  CHECK(say(book, 1, of_kind("barrier", "a", 5)).empty());
  CHECK(book.define_set(5, {1}).size() == 1);
}

TEST_CASE("What ranks say otherwise is an error for those that said it", "[name_book]") {
  NameBook book(2);
  say(book, 1, allreduce("a", "[4]"));
  auto decided = say(book, 0, allreduce("a"));
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.error ==
        "got another shape on each rank: rank 0 has [3], rank 1 has [4]");
  say(book, 0, of_kind("allgather", "a"));
  decided = say(book, 1, allreduce("a"));
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.error ==
        "got other operations: rank 0 has allgather, rank 1 has allreduce");
  say(book, 0, allreduce("a"));
  CHECK(say(book, 1, allreduce("a"))[0].agreed.error.empty());
}

TEST_CASE("Who has joined takes part with zeros", "[name_book]") {
  NameBook book(3);
  CHECK(say(book, 0, allreduce("a")).empty());
  CHECK(say(book, 2, allreduce("a")).empty());
  auto decided = say(book, 1, joined());
  REQUIRE(decided.size() == 2);  // it was the last one that others waited for
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 1, 2});
  CHECK(say(book, 0, of_kind("broadcast", "b")).empty());
  decided = say(book, 2, of_kind("broadcast", "b"));
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.error ==
        "got broadcast while rank 1 has joined, expected allreduces only");
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 2});
  CHECK(say(book, 2, joined()).size() == 1);  // is told to rank 0
  decided = say(book, 0, joined());
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.kind == NameBook::kJoin);
  CHECK(decided[0].agreed.last_joined == 0);
  CHECK(say(book, 1, allreduce("c")).empty());  // it has not joined any more
}

TEST_CASE("What waits for too long is given up, and its name is free", "[name_book]") {
  NameBook book(3);
  say(book, 0, allreduce("a"));
  say(book, 2, allreduce("a"));
  say(book, 1, allreduce("b"));
  const auto decided = book.fail(book.waiting()[0], "too long");
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 2});
  CHECK(decided[0].agreed.error == "too long");
  CHECK(book.waiting().size() == 1);
  CHECK(say(book, 1, allreduce("a")).empty());
}

NamedOperation again() { return of_kind(NameBook::kBeginAgain, NameBook::kBeginAgain); }

TEST_CASE("What waits for a rank that begins again ends, and so does what others issue then",
          "[name_book]") {
  NameBook book(3);
  book.define_set(4, {0, 2});
  say(book, 0, allreduce("a"));
  say(book, 1, allreduce("mine"));
  say(book, 0, of_kind("barrier", "b", 4));
  auto decided = say(book, 1, again());
  REQUIRE(decided.size() == 2);
  CHECK(decided[0].agreed.operation.name == "a");
  CHECK(decided[0].agreed.error == "rank 1 begins again");
  CHECK(decided[0].ranks == std::vector<int64_t>{0});
  CHECK(decided[1].agreed.operation.name == "mine");
  CHECK(decided[1].ranks == std::vector<int64_t>{1});

  decided = say(book, 2, allreduce("late"));
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.error == "rank 1 begins again");
  CHECK(decided[0].ranks == std::vector<int64_t>{2});
  CHECK(say(book, 2, of_kind("barrier", "b", 4))[0].agreed.error.empty());  // of others

  CHECK(say(book, 0, again()).empty());
  CHECK(say(book, 2, joined())[0].agreed.error == "rank 0 begins again");  // the lowest of them
  decided = say(book, 2, again());
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.kind == NameBook::kBeginAgain);
  CHECK(decided[0].agreed.error.empty());
  CHECK(decided[0].ranks == std::vector<int64_t>{0, 1, 2});
  CHECK(book.waiting().empty());
  for (int64_t rank = 0; rank < 2; ++rank) CHECK(say(book, rank, allreduce("a")).empty());
  CHECK(say(book, 2, allreduce("a"))[0].agreed.error.empty());
}

TEST_CASE("Ranks that have joined hear of one that begins again", "[name_book]") {
  NameBook book(2);
  CHECK(say(book, 0, joined()).size() == 1);  // is told to rank 1
  auto decided = say(book, 1, again());
  REQUIRE(decided.size() == 1);
  CHECK(decided[0].agreed.operation.kind == NameBook::kJoin);
  CHECK(decided[0].agreed.error == "rank 1 begins again");
  CHECK(decided[0].ranks == std::vector<int64_t>{0});
  CHECK(book.waiting()[0].missing == std::vector<int64_t>{0});
  const auto failed = book.fail(book.waiting()[0], "waited");
  CHECK(failed[0].ranks == std::vector<int64_t>{1});
  CHECK(say(book, 0, allreduce("a")).empty());  // nobody begins again any more
  CHECK(say(book, 1, allreduce("a"))[0].agreed.error.empty());
}

}  // namespace
}  // namespace name_book_test
