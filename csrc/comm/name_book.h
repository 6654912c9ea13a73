#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// [Note: named operations]
//
// Ranks issue operations by name, each in an order of its own. One rank of them keeps a book of
// names. Every rank tells it what it has issued; when the last rank of a set has named an operation
// the book compares what they said and decides: all of them run it next, or all of them get an
// error. The decisions reach every rank in one order, so that operations of sets that overlap do
// not wait for each other crosswise. Nothing has moved before.
//
// A rank that has joined has nothing to issue: the others decide without it, and it takes part with
// zeros. The last one to join lets all go on. Ranks that have not joined hear of each that does
// (kHasJoined). From then on they say what they begin beside these operations (kBegun), such as a
// backward, which ranks that have joined are told at once.
//
// A rank that begins again gives up what it has issued, and what others wait for it with: they all
// get an error, and so does what they issue from then on, until every rank has begun again.

// What a rank says of an operation that it has issued.
struct NamedOperation {
  std::string name = {};  // of a set no two in flight have the same one
  int64_t set = 0;        // of all ranks: kAllRanks
  std::string kind = {};  // "allreduce"; compared, as the terms are
  // What must be equal on all ranks, by name: {"shape", "[3]"}.
  std::vector<std::pair<std::string, std::string>> terms = {};
  std::string payload = {};     // what may differ, and every rank gets: a first dimension
  bool can_have_zeros = false;  // whether ranks that have joined take part
};

// What the ranks of a set do next.
struct AgreedOperation {
  NamedOperation operation = {};           // as one of them has said it
  std::vector<std::string> payloads = {};  // by place in the set; "" of a rank that has joined
  std::string error = {};                  // why none runs it; "" if all do
  int64_t last_joined = -1;                // of kJoin: who joined last
};

// Compares what ranks say, and decides. Pure: it sends nothing.
class TRIREME_API NameBook {
 public:
  static constexpr int64_t kAllRanks = 0;
  static constexpr const char* kJoin = "join";
  static constexpr const char* kHasJoined = "has joined";
  static constexpr const char* kBegun = "begun";
  static constexpr const char* kBeginAgain = "begin again";
  using Clock = std::chrono::steady_clock;

  explicit NameBook(int64_t world);

  struct Decision {
    std::vector<int64_t> ranks;  // who is told
    AgreedOperation agreed;
  };
  // Adds a set of ranks, which may have been named in operations before.
  std::vector<Decision> define_set(int64_t set, std::vector<int64_t> ranks);
  // Takes what a rank has issued; of kind kJoin, that it has joined; of kind kBegun, what it has
  // begun; of kind kBeginAgain, that it begins again.
  std::vector<Decision> announce(int64_t from, NamedOperation operation, Clock::time_point now);

  // An operation that some ranks have issued and others have not.
  struct Waiting {
    NamedOperation operation;
    std::vector<int64_t> issued;
    std::vector<int64_t> missing;
    Clock::time_point since;
  };
  std::vector<Waiting> waiting() const;
  // Ends an operation that waits, with this text.
  std::vector<Decision> fail(const Waiting& waiting, const std::string& why);

 private:
  struct Entry {
    std::map<int64_t, NamedOperation> said;  // by rank
    Clock::time_point since;
    uint64_t number = 0;  // in the order of the first rank that named it
  };
  using Key = std::pair<int64_t, std::string>;

  std::optional<Decision> decide(const Key& key, const Entry& entry) const;
  std::string difference_in(const Entry& entry) const;
  std::vector<Key> keys_in_order() const;
  std::vector<Decision> decide_all(int64_t set);
  std::vector<Decision> join(int64_t rank);
  std::vector<Decision> tell_joined(NamedOperation begun) const;
  std::vector<Decision> end_operations_of(int64_t rank);
  std::optional<int64_t> rank_that_begins_again(int64_t set) const;
  bool has_rank(int64_t set, int64_t rank) const;
  std::vector<int64_t> missing_in(const Key& key, const Entry& entry) const;

  int64_t world_;
  std::map<int64_t, std::vector<int64_t>> sets_;
  std::map<Key, Entry> entries_;
  std::set<int64_t> joined_;
  uint64_t announced_ = 0;
};

}  // namespace trireme
