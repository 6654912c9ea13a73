#include <trireme/param/gather_log.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>

namespace trireme {
namespace {

constexpr const char* kPlaces[] = {"outside of a pass", "in a forward", "in a backward"};

struct Reading {
  size_t rank = 0;
  int64_t last = 0;                         // number of the last gather
  std::map<int64_t, std::string> gathered;  // units, by number
};

Reading read(size_t rank, const std::string& text, const std::vector<std::string>& unit_names) {
  Reading all;
  all.rank = rank;
  std::istringstream stream(text);
  int64_t number = 0;
  stream >> number;
  size_t unit = 0;
  size_t pass = 0;
  for (; stream >> unit >> pass; ++number)
    all.gathered[number] = "unit '" + unit_names.at(unit) + "' " + kPlaces[pass % 3];
  all.last = number - 1;
  return all;
}

}  // namespace

void GatherLog::note(int64_t unit, Pass pass) {
  const auto place = static_cast<size_t>(count_++) % kKept;
  if (place == last_.size()) last_.emplace_back();
  last_[place] = {unit, pass};
  hash_ ^= static_cast<uint64_t>(unit) + 1;
  hash_ *= 0x9e3779b97f4a7c15;  // spreads every bit upwards, and what follows back down
  hash_ ^= hash_ >> 29;
}

std::string GatherLog::text() const {
  const auto kept = static_cast<int64_t>(last_.size());
  std::string text = std::to_string(count_ - kept + 1);
  for (int64_t i = count_ - kept; i < count_; ++i) {
    const Gather& gather = last_[static_cast<size_t>(i) % kKept];
    text += " " + std::to_string(gather.unit) + " " + std::to_string(static_cast<int>(gather.pass));
  }
  return text;
}

std::string GatherLog::difference(const std::vector<std::string>& texts,
                                  const std::vector<std::string>& unit_names) {
  std::vector<Reading> ranks;
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) ranks.push_back(read(rank, texts[rank], unit_names));
  int64_t first = 1;
  int64_t last = 0;
  for (const Reading& reading : ranks) {
    first = std::max(first, reading.gathered.empty() ? 1 : reading.gathered.begin()->first);
    last = std::max(last, reading.last);
  }
  for (int64_t number = first; number <= last; ++number) {
    std::string said;
    std::optional<std::string> what;
    bool is_same = true;
    for (const Reading& reading : ranks) {
      const auto found = reading.gathered.find(number);
      const std::string own = found == reading.gathered.end() ? "nothing" : found->second;
      is_same = is_same && what.value_or(own) == own;
      what = own;
      said +=
          (said.empty() ? "rank " : ", rank ") + std::to_string(reading.rank) + " gathered " + own;
    }
    if (!is_same) return "as gather " + std::to_string(number) + ", " + said;
  }
  return "";
}

}  // namespace trireme
