// What becomes of a plan that a pass has left, and by what ranks tell their gathers apart.

#include <trireme/param/gather_plans.h>

#include <trireme/param/gather_log.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::gather_plans_test {

namespace {

const GatherPlans::Key kRoot{0, true};

// The plan after one that a pass left; empty where passes are to agree about each gather.
std::string after(const std::string& plan, int64_t used, const std::string& instead,
                  int64_t ahead = 0, int64_t needed = -1) {
  const auto units = [](const std::string& text) {
    return GatherPlans::Plan(text.begin(), text.end());
  };
  GatherPlans plans;
  plans.learn(kRoot, units(plan));
  plans.leave(kRoot, {used, needed < 0 ? used : needed, used + ahead, units(instead)},
              units(plan + instead));
  const GatherPlans::Plan* found = plans.find(kRoot);
  return found ? std::string(found->begin(), found->end()) : "";
}

}  // namespace

TEST_CASE("units that a plan lacked get the places at which they were needed") {
  CHECK(after("abde", 2, "ce") == "abcde");
  CHECK(after("abdf", 2, "cef", /*ahead=*/1) == "abcdef");
  CHECK(after("bc", 0, "abc") == "abc");
  CHECK(after("abd", 3, "e") == "abde");
  CHECK(after("acfg", 1, "bdeg") == "abdecfg");
}

TEST_CASE("a plan fails where a unit comes again, in another order, or instead of many") {
  CHECK(after("ab", 2, "a") == "");
  CHECK(after("abcd", 1, "cb") == "");
  CHECK(after("ab", 1, "cc") == "");
  CHECK(after("abcdefgh", 1, "x") == "");  // two of nine are used
  CHECK(after("abcdefgh", 8, "x", 0, /*needed=*/2) == "");
}

TEST_CASE("ranks say which gather is the first that differs") {
  using Pass = GatherLog::Pass;
  const auto log_of = [](const std::string& units, Pass last) {
    GatherLog log;
    for (size_t i = 0; i < units.size(); ++i)
      log.note(units[i] - 'a', i + 1 == units.size() ? last : Pass::kForward);
    return log;
  };
  const auto difference = [](const std::vector<GatherLog>& logs) {
    std::vector<std::string> texts;
    for (const GatherLog& log : logs) texts.push_back(log.text());
    return GatherLog::difference(texts, {"A", "B"});
  };
  const GatherLog aba = log_of("aba", Pass::kForward);
  CHECK(difference({aba, aba}) == "");
  CHECK(aba.hash() == log_of("aba", Pass::kBackward).hash());
  CHECK(aba.hash() != log_of("abb", Pass::kForward).hash());
  CHECK(aba.hash() != log_of("ab", Pass::kForward).hash());
  CHECK(difference({aba, aba, log_of("abb", Pass::kBackward)}) ==
        "as gather 3, rank 0 gathered unit 'A' in a forward, rank 1 gathered unit 'A' in a "
        "forward, rank 2 gathered unit 'B' in a backward");
  CHECK(difference({aba, log_of("ab", Pass::kForward)}) ==
        "as gather 3, rank 0 gathered unit 'A' in a forward, rank 1 gathered nothing");
  GatherLog longer;
  for (int i = 0; i < 2000; ++i) longer.note(i % 2, Pass::kForward);
  GatherLog other = longer;
  longer.note(0, Pass::kForward);
  other.note(1, Pass::kForward);
  CHECK_THAT(difference({longer, other}), Catch::Contains("as gather 2001, rank 0"));
}

}  // namespace trireme::gather_plans_test
