// In which order units are gathered. With a recorded group one rank runs, and its peer needs the
// same units; ranks that need others run as threads.

#include <trireme/param/prefetch.h>

#include <trireme/memory/buffer_pool.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <recording_communicator.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::prefetch_test {

using trireme::test::error_of;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::WireRecord;

namespace {

constexpr int64_t kUnitBytes = 64;

// Units a, b, c of one parameter each, and the wire: a letter for each gather, '?' where ranks tell
// each other what they need.
struct Units {
  explicit Units(std::shared_ptr<Communicator> over, const std::string& names = "abc")
      : wire(std::dynamic_pointer_cast<RecordingCommunicator>(over)) {
    for (const char name : names) {
      std::vector<ShardedParamSpec> specs{{std::string(1, name), {4}}};
      groups.push_back(std::make_shared<ParamGroup>(ParamGroupRequest{std::move(specs), over}));
      groups.back()->memory().share_pool(pool);
    }
    prefetch = std::make_unique<Prefetch>(groups);
  }

  ParamGroup& unit(char name) { return *groups[static_cast<size_t>(name - 'a')]; }
  void need(char name) { prefetch->need(unit(name)); }
  void use(char name) {
    need(name);
    prefetch->done(unit(name));
  }
  // What went over the wire since the last call.
  std::string gathered() {
    std::string letters;
    if (!wire) return letters;
    for (const WireRecord& record : wire->records())
      letters += record.label == "units that ranks need" ? '?' : record.label.back();
    wire->clear();
    return letters;
  }
  std::string there() const {
    std::string letters;
    for (const auto& group : groups)
      if (group->has_unsharded()) letters += group->label();
    return letters;
  }
  std::string forward(const std::string& used, bool trains = true) {
    prefetch->begin_forward(nullptr, trains);
    for (const char name : used) use(name);
    prefetch->end_pass();
    return gathered();
  }
  std::string backward(const std::string& used) {
    prefetch->begin_backward();
    prefetch->enter_forward(prefetch->last_forward());
    for (const char name : used) use(name);
    prefetch->end_pass();
    return gathered();
  }

  std::shared_ptr<RecordingCommunicator> wire;
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>(c10::kCPU);
  std::vector<std::shared_ptr<ParamGroup>> groups;
  std::unique_ptr<Prefetch> prefetch;
};

struct TwoRanks : Units {
  explicit TwoRanks(const std::string& names = "abc")
      : Units(std::make_shared<RecordingCommunicator>(RankOf{0, 2}), names) {}
};

}  // namespace

TEST_CASE("the first forward makes the plan; the next ones and their backwards go by it") {
  TwoRanks units;
  CHECK(units.forward("abc") == "?a?b?c?");
  CHECK(units.there() == "");
  CHECK(units.backward("cba") == "cba");
  CHECK(units.forward("abc") == "abc");
  CHECK(units.forward("ab", /*trains=*/false) == "?a?b?");  // has a plan of its own
  CHECK(units.forward("ab", /*trains=*/false) == "ab");
  CHECK(units.backward("ba") == "ba");
  CHECK(units.there() == "");
}

TEST_CASE("while one unit computes the next one is on its way, or those that were set") {
  TwoRanks units;
  units.forward("abc");
  const auto after_first = [&] {
    units.prefetch->begin_forward(nullptr, true);
    units.need('a');
    return units.gathered();
  };
  CHECK(after_first() == "ab");
  units.prefetch->reset();
  units.prefetch->set_forward_prefetch(units.unit('a'), {&units.unit('b'), &units.unit('c')});
  CHECK(after_first() == "abc");
  units.prefetch->reset();
  units.prefetch->set_forward_prefetch(units.unit('a'), {});
  CHECK(after_first() == "a");
  units.prefetch->end_pass();
  CHECK(units.gathered() == "bc");  // others may need them
  units.prefetch->set_backward_prefetch(units.unit('c'), {&units.unit('a')});
  units.prefetch->begin_backward();
  units.prefetch->enter_forward(units.prefetch->last_forward());
  units.need('c');
  CHECK(units.gathered() == "cba");
}

TEST_CASE(
    "what is not used is gathered all the same, and goes; so does what is used in another order") {
  TwoRanks units;
  units.forward("abc");
  CHECK(units.forward("ac") == "abc");
  CHECK(units.there() == "");
  CHECK(units.forward("cab") == "abc");
  CHECK(units.forward("") == "abc");
  CHECK(units.backward("b") == "cba");
  CHECK(units.there() == "");
}

TEST_CASE("what only others need comes and goes by itself at the end of a pass") {
  TwoRanks units("abcdef");
  units.forward("abcdef");
  CHECK(units.backward("") == "fedcba");  // nothing is trained, or in the last units only
  CHECK(units.forward("a") == "abcdef");
  CHECK(units.backward("fe") == "fedcba");
  CHECK(units.pool->most_taken_bytes() == 2 * kUnitBytes);
  units.unit('c').flags().reshard_after_forward = false;
  CHECK(units.forward("a") == "abcdef");
  CHECK(units.there() == "c");
  CHECK(units.forward("a") == "abdef");
  CHECK(units.backward("f") == "fedba");
  CHECK(units.there() == "");
  CHECK(units.pool->most_taken_bytes() == 3 * kUnitBytes);
}

TEST_CASE("backward comes first to the unit around the others, whether it was kept or not") {
  for (const bool reshards : {false, true}) {
    TwoRanks units;
    units.unit('a').flags().reshard_after_forward = reshards;
    units.prefetch->begin_forward(&units.unit('a'), true);
    units.need('a');
    for (const char name : std::string("bc")) units.use(name);
    if (reshards) units.prefetch->done(units.unit('a'));
    units.prefetch->end_pass();
    CHECK(units.gathered() == "?a?b?c?");
    units.prefetch->begin_backward();
    units.prefetch->enter_forward(units.prefetch->last_forward());
    units.need('a');
    CHECK(units.gathered() == (reshards ? "ac" : "c"));
    units.use('c');
    CHECK(units.there() == "ab");
    units.use('b');
    units.prefetch->end_pass();
    CHECK(units.gathered() == "b");
    CHECK(units.there() == "");
  }
}

TEST_CASE("a unit that comes twice is gathered twice") {
  TwoRanks units;
  CHECK(units.forward("aba") == "?a?b?a?");
  CHECK(units.forward("aba") == "aba");
  CHECK(units.backward("aba") == "aba");
}

TEST_CASE("what comes after its place in the plan is gathered when all ranks agree") {
  TwoRanks units;
  units.forward("abc");
  CHECK(units.forward("abab") == "abc?a?b?");  // c was on its way while b computed
  CHECK(units.there() == "");
  CHECK(units.backward("baba") == "bacba");
  CHECK(units.there() == "");
  CHECK(units.forward("abc") == "?a?b?c?");  // no plan is known that holds
  CHECK(units.forward("abc") == "?a?b?c?");
  CHECK(units.forward("abc") == "?a?b?c?");
  CHECK(units.forward("abc") == "abc");
  CHECK(units.backward("cba") == "cba");
  CHECK(units.forward("abca") == "abc?a?");
  for (int pass = 0; pass < 5; ++pass) CHECK(units.forward("abc") == "?a?b?c?");
  CHECK(units.forward("abc") == "abc");
}

TEST_CASE("what the first forward had left out gets its place in the plan") {
  TwoRanks units("abcdef");
  units.forward("abdf");
  CHECK(units.forward("abcdef") == "abd?c?e?f?");
  CHECK(units.there() == "");
  CHECK(units.backward("fedcba") == "fecdba");
  CHECK(units.forward("abcdef") == "abcdef");
  CHECK(units.forward("af") == "abcdef");
  CHECK(units.backward("fa") == "fedcba");
}

TEST_CASE("a backward that computes in its own order what forward did not gather agrees about it") {
  TwoRanks units;
  units.forward("ab");
  units.prefetch->begin_backward();
  units.prefetch->enter_forward(units.prefetch->last_forward());
  for (const char name : std::string("babca")) units.use(name);
  units.prefetch->end_pass();
  CHECK(units.gathered() == "ba?b?c?a?");
  CHECK(units.there() == "");
}

TEST_CASE("with a dynamic plan ranks agree about each gather") {
  TwoRanks units;
  units.forward("abc");
  units.prefetch->set_dynamic(true);
  CHECK(units.forward("aba") == "?a?b?a?");
  CHECK(units.forward("cb") == "?c?b?");
  CHECK(units.backward("bc") == "?b?c?");
}

TEST_CASE("units that are kept after forward are gathered once, until somebody writes") {
  TwoRanks units;
  units.unit('b').flags().reshard_after_forward = false;
  CHECK(units.forward("abc") == "?a?b?c?");
  CHECK(units.there() == "b");
  CHECK(units.backward("cba") == "ca");
  CHECK(units.there() == "");
  CHECK(units.forward("abc") == "abc");
  CHECK(units.forward("abc") == "ac");
  units.prefetch->expire();
  CHECK(units.there() == "");
  CHECK(units.forward("abc") == "abc");
}

TEST_CASE("outside of a pass a unit is there from need to drop") {
  TwoRanks units;
  units.prefetch->need_later(units.unit('b'));
  CHECK(units.gathered() == "b");
  units.need('b');
  CHECK(units.gathered() == "");
  CHECK(units.there() == "b");
  units.prefetch->drop(units.unit('b'));
  CHECK(units.there() == "");
}

TEST_CASE("ranks that need different units gather the same, in one order") {
  std::vector<std::string> wires(2), said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const auto own = static_cast<size_t>(rank.where.rank);
    Units units(std::make_shared<RecordingCommunicator>(rank.communicator));
    const auto write = [&](double times) {
      for (const auto& group : units.groups)
        group->params()[0].write_whole(at::full({4}, times * (group->label()[0] - 'a' + 1)));
    };
    const auto check = [&](char name, double times) {
      units.need(name);
      const at::Tensor& whole = units.unit(name).params()[0].unsharded();
      if (!at::equal(whole, at::full({4}, times * (name - 'a' + 1)))) said[own] += name;
      units.prefetch->done(units.unit(name));
    };
    for (const double times : {1.0, 2.0, 3.0}) {
      write(times);
      units.prefetch->begin_forward(nullptr, true);
      check('a', times);
      check((own == 0) == (times == 1.0) ? 'b' : 'c', times);
      units.prefetch->end_pass();
      units.prefetch->begin_backward();
      units.prefetch->enter_forward(units.prefetch->last_forward());
      check('a', times);
      units.prefetch->end_pass();
      wires[own] += units.gathered() + " ";
    }
  });
  for (const size_t own : {0, 1}) {
    CHECK(wires[own] == "?a?bc?cba abccba abccba ");
    CHECK(said[own] == "");
  }
}

TEST_CASE("ranks that leave the plan for different units go on together") {
  for (const int64_t world : {2, 3}) {
    std::vector<std::string> wires(static_cast<size_t>(world)), there(static_cast<size_t>(world));
    run_thread_ranks(world, [&](ThreadRank& rank) {
      const auto own = static_cast<size_t>(rank.where.rank);
      Units units(std::make_shared<RecordingCommunicator>(rank.communicator));
      units.forward("abc");
      wires[own] = units.forward(own == 0 ? "abba" : "abab");
      wires[own] += units.backward("ba");
      wires[own] += units.forward(own == 0 ? "a" : "c");
      there[own] = units.there();
    });
    for (size_t own = 0; own < wires.size(); ++own) {
      CHECK(wires[own] == "abc?ab?bacba?ac?");
      CHECK(there[own] == "");
    }
  }
}

TEST_CASE("a rank that leaves the plan alone, and one that gathers by it, are told of each other") {
  for (const int64_t world : {2, 3}) {
    std::vector<std::string> said(static_cast<size_t>(world));
    run_thread_ranks(world, [&](ThreadRank& rank) {
      const auto own = static_cast<size_t>(rank.where.rank);
      Units units(rank.communicator);
      units.forward("abc");
      said[own] = error_of<c10::DistBackendError>([&] {
        units.forward(own == 0 ? "abca" : "abc");
        units.backward("cba");
      });
    });
    for (const std::string& text : said) {
      CHECK_THAT(text, Catch::Contains("waits for all ranks in a forward that needs unit 'a'"));
      CHECK_THAT(text, Catch::Contains("to which rank 0 has not come"));
    }
  }
}

TEST_CASE("ranks that agree about a unit compare what they have gathered before") {
  std::vector<std::string> said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const auto own = static_cast<size_t>(rank.where.rank);
    Units units(rank.communicator);
    units.forward("abc");
    for (const char name : std::string(own == 0 ? "ab" : "ba")) {
      units.prefetch->need_later(units.unit(name));
      units.need(name);
      units.prefetch->drop(units.unit(name));
    }
    said[own] = error_of<c10::DistBackendError>([&] { units.forward("abca"); });
  });
  for (const std::string& text : said)
    CHECK_THAT(text, Catch::Contains("as gather 4, rank 0 gathered unit 'a' outside of a pass, "
                                     "rank 1 gathered unit 'b' outside of a pass"));
}

TEST_CASE(
    "who is through with a first pass has one unit at a time, and so has who makes its plan") {
  std::vector<int64_t> most_taken(2);
  std::vector<std::string> wires(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const auto own = static_cast<size_t>(rank.where.rank);
    Units units(std::make_shared<RecordingCommunicator>(rank.communicator), "abcdef");
    wires[own] = units.forward(own == 0 ? "a" : "abcdef");
    most_taken[own] = units.pool->most_taken_bytes();
  });
  for (const size_t own : {0, 1}) {
    CHECK(wires[own] == "?a?b?c?d?e?f?");
    CHECK(most_taken[own] == kUnitBytes);
  }
}

}  // namespace trireme::prefetch_test
