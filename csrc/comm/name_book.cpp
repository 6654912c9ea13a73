#include <trireme/comm/name_book.h>

#include <algorithm>
#include <numeric>

namespace trireme {
namespace {

std::string said_ranks(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string side(int64_t rank, const std::string& value) {
  return "rank " + std::to_string(rank) + " has " + value;
}

std::vector<int64_t> ranks_of(const std::map<int64_t, NamedOperation>& said) {
  std::vector<int64_t> ranks;
  for (const auto& [rank, operation] : said) ranks.push_back(rank);
  return ranks;
}

std::string begins_again(int64_t rank) { return "rank " + std::to_string(rank) + " begins again"; }

NamedOperation all_joined() {
  NamedOperation operation;
  operation.kind = operation.name = NameBook::kJoin;
  return operation;
}

NameBook::Decision error_to(std::vector<int64_t> ranks, const NamedOperation& operation,
                            std::string why) {
  NameBook::Decision decision{std::move(ranks), {}};
  decision.agreed.operation = operation;
  decision.agreed.error = std::move(why);
  return decision;
}

}  // namespace

NameBook::NameBook(int64_t world) : world_(world) {
  std::vector<int64_t> all(static_cast<size_t>(world));
  std::iota(all.begin(), all.end(), 0);
  sets_[kAllRanks] = std::move(all);
}

std::vector<NameBook::Decision> NameBook::define_set(int64_t set, std::vector<int64_t> ranks) {
  sets_[set] = std::move(ranks);
  return decide_all(set);
}

std::vector<NameBook::Decision> NameBook::announce(int64_t from, NamedOperation operation,
                                                   Clock::time_point now) {
  if (operation.kind == kBegun) return tell_joined(std::move(operation));
  std::vector<Decision> decisions;
  if (operation.kind == kBeginAgain)
    decisions = end_operations_of(from);
  else if (const auto other = rank_that_begins_again(operation.set))
    return {error_to({from}, operation, begins_again(*other))};
  if (operation.kind == kJoin) return join(from);
  const Key key{operation.set, operation.name};
  Entry& entry = entries_[key];
  if (entry.said.empty()) {
    entry.since = now;
    entry.number = announced_++;
  }
  entry.said.emplace(from, std::move(operation));
  if (std::optional<Decision> decision = decide(key, entry)) {
    entries_.erase(key);
    decisions.push_back(*std::move(decision));
  }
  return decisions;
}

bool NameBook::has_rank(int64_t set, int64_t rank) const {
  const auto found = sets_.find(set);
  return found != sets_.end() &&
         std::find(found->second.begin(), found->second.end(), rank) != found->second.end();
}

std::optional<int64_t> NameBook::rank_that_begins_again(int64_t set) const {
  const auto entry = entries_.find({kAllRanks, kBeginAgain});
  if (entry == entries_.end()) return std::nullopt;
  for (const auto& [rank, operation] : entry->second.said)
    if (has_rank(set, rank)) return rank;
  return std::nullopt;
}

// Ends what waits for a rank that begins again, in the order in which it was named, and joins.
std::vector<NameBook::Decision> NameBook::end_operations_of(int64_t rank) {
  const std::string why = begins_again(rank);
  std::vector<Decision> decisions;
  for (const Key& key : keys_in_order()) {
    const Entry& entry = entries_.at(key);
    const NamedOperation first = entry.said.begin()->second;
    if (first.kind == kBeginAgain || !has_rank(key.first, rank)) continue;
    decisions.push_back(error_to(ranks_of(entry.said), first, why));
    entries_.erase(key);
  }
  if (!joined_.empty())
    decisions.push_back(error_to({joined_.begin(), joined_.end()}, all_joined(), why));
  joined_.clear();
  return decisions;
}

std::vector<NameBook::Decision> NameBook::join(int64_t rank) {
  joined_.insert(rank);
  std::vector<Decision> decisions = decide_all(kAllRanks);
  if (static_cast<int64_t>(joined_.size()) < world_) {
    Decision others;
    for (const int64_t other : sets_.at(kAllRanks))
      if (joined_.count(other) == 0) others.ranks.push_back(other);
    others.agreed.operation.kind = kHasJoined;
    decisions.push_back(std::move(others));
    return decisions;
  }
  joined_.clear();
  Decision all{sets_.at(kAllRanks), {}};
  all.agreed.operation = all_joined();
  all.agreed.last_joined = rank;
  decisions.push_back(std::move(all));
  return decisions;
}

std::vector<NameBook::Decision> NameBook::tell_joined(NamedOperation begun) const {
  if (joined_.empty()) return {};
  return {{{joined_.begin(), joined_.end()}, {std::move(begun), {}, {}, -1}}};
}

std::vector<NameBook::Waiting> NameBook::waiting() const {
  std::vector<Waiting> found;
  for (const auto& [key, entry] : entries_) {
    found.push_back(
        {entry.said.begin()->second, ranks_of(entry.said), missing_in(key, entry), entry.since});
  }
  return found;
}

std::vector<NameBook::Decision> NameBook::fail(const Waiting& waiting, const std::string& why) {
  entries_.erase({waiting.operation.set, waiting.operation.name});
  return {error_to(waiting.issued, waiting.operation, why)};
}

// Ranks of a set that is not known yet are not known to be missing; the operation waits all the
// same.
std::vector<int64_t> NameBook::missing_in(const Key& key, const Entry& entry) const {
  const auto set = sets_.find(key.first);
  if (set == sets_.end()) return {};
  std::vector<int64_t> missing;
  for (const int64_t rank : set->second)
    if (entry.said.count(rank) == 0 && (key.first != kAllRanks || joined_.count(rank) == 0))
      missing.push_back(rank);
  return missing;
}

std::optional<NameBook::Decision> NameBook::decide(const Key& key, const Entry& entry) const {
  const auto set = sets_.find(key.first);
  if (set == sets_.end() || !missing_in(key, entry).empty()) return std::nullopt;
  const NamedOperation& first = entry.said.begin()->second;
  std::string why = difference_in(entry);
  const bool has_joined = entry.said.size() < set->second.size();
  if (why.empty() && has_joined && !first.can_have_zeros)
    why = "got " + first.kind + " while " + said_ranks({joined_.begin(), joined_.end()}) +
          " has joined, expected allreduces only";
  if (!why.empty()) return error_to(ranks_of(entry.said), first, std::move(why));
  Decision decision{set->second, {first, {}, {}, -1}};
  for (const int64_t rank : set->second) {
    const auto said = entry.said.find(rank);
    decision.agreed.payloads.push_back(said == entry.said.end() ? "" : said->second.payload);
  }
  return decision;
}

// Returns what the first rank that differs says otherwise than the lowest; "" if none differs.
std::string NameBook::difference_in(const Entry& entry) const {
  const auto& [lowest, expected] = *entry.said.begin();
  for (const auto& [rank, got] : entry.said) {
    if (got.kind != expected.kind)
      return "got other operations: " + side(lowest, expected.kind) + ", " + side(rank, got.kind);
    for (size_t i = 0; i < std::max(got.terms.size(), expected.terms.size()); ++i) {
      const std::pair<std::string, std::string> none{"terms", "none"};
      const auto& own = i < expected.terms.size() ? expected.terms[i] : none;
      const auto& other = i < got.terms.size() ? got.terms[i] : none;
      if (own != other)
        return "got another " + own.first + " on each rank: " + side(lowest, own.second) + ", " +
               side(rank, other.second);
    }
  }
  return "";
}

// Returns names as the first rank of each has issued them.
std::vector<NameBook::Key> NameBook::keys_in_order() const {
  std::vector<std::pair<uint64_t, Key>> numbered;
  for (const auto& [key, entry] : entries_) numbered.emplace_back(entry.number, key);
  std::sort(numbered.begin(), numbered.end());
  std::vector<Key> keys;
  for (auto& [number, key] : numbered) keys.push_back(std::move(key));
  return keys;
}

std::vector<NameBook::Decision> NameBook::decide_all(int64_t set) {
  std::vector<Decision> decisions;
  for (const Key& key : keys_in_order()) {
    if (key.first != set) continue;
    std::optional<Decision> decision = decide(key, entries_.at(key));
    if (!decision) continue;
    entries_.erase(key);
    decisions.push_back(*std::move(decision));
  }
  return decisions;
}

}  // namespace trireme
