#include <trireme/saving/optimizer_text.h>

#include <trireme/saving/json_text.h>

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <set>

namespace trireme {
namespace {

using TextJson = nlohmann::ordered_json;

// Returns the groups of a text; null if it has none in our form.
TextJson groups_of(const std::string& text) {
  const TextJson parsed = TextJson::parse(text);
  const auto found = parsed.find("param_groups");
  if (found == parsed.end() || !found->is_array()) return nullptr;
  for (const TextJson& group : *found)
    if (!group.is_object() || !group.contains("params") || !group["params"].is_array())
      return nullptr;
  return *found;
}

bool has_same_params(const TextJson& one, const TextJson& other) {
  bool same = one.size() == other.size();
  for (size_t i = 0; same && i < one.size(); ++i) same = one[i]["params"] == other[i]["params"];
  return same;
}

[[noreturn]] void refuse_groups(const std::string& got, RankOf where) {
  const std::string next_step =
      "Give the optimizers of all ranks the same groups, also where one of them is empty.";
  C10_THROW_ERROR(ValueError, error_text("saving", "got " + got, where, next_step));
}

// Throws ValueError unless the groups of two ranks differ in their parameters only.
void compare(const TextJson& first, int64_t first_rank, const TextJson& other, int64_t rank,
             RankOf where) {
  const auto on = [](int64_t number) { return " on rank " + std::to_string(number); };
  if (first.size() != other.size())
    refuse_groups(std::to_string(first.size()) + " parameter groups on rank " +
                      std::to_string(first_rank) + " and " + std::to_string(other.size()) +
                      on(rank),
                  where);
  for (size_t i = 0; i < first.size(); ++i) {
    std::set<std::string> keys;
    for (const TextJson* group : {&first[i], &other[i]})
      for (const auto& [key, value] : group->items()) keys.insert(key);
    keys.erase("params");
    for (const std::string& key : keys) {
      const auto said = [&](const TextJson& group) {
        return group.contains(key) ? group[key].dump() : "nothing";
      };
      if (said(first[i]) != said(other[i]))
        refuse_groups("'" + key + "' of parameter group " + std::to_string(i) + " as " +
                          said(first[i]) + on(first_rank) + " and as " + said(other[i]) + on(rank),
                      where);
    }
  }
}

}  // namespace

std::string merge_optimizer_texts(const std::vector<TextOfRank>& texts, RankOf where) {
  std::vector<std::string> all;
  for (const TextOfRank& own : texts) all.push_back(own.text);
  const std::string text = merge_json(all);
  const TextJson first = groups_of(texts.front().text);
  TextJson merged = first;
  std::vector<std::set<std::string>> known(first.size());
  for (const TextOfRank& own : texts) {
    const TextJson groups = groups_of(own.text);
    if (first.is_null() || groups.is_null() || has_same_params(first, groups)) continue;
    compare(first, texts.front().rank, groups, own.rank, where);
    for (size_t i = 0; i < groups.size(); ++i) {
      if (known[i].empty()) known[i] = first[i]["params"].get<std::set<std::string>>();
      for (const TextJson& name : groups[i]["params"])
        if (known[i].insert(name.get<std::string>()).second) merged[i]["params"].push_back(name);
    }
  }
  if (merged == first) return text;
  TextJson result = TextJson::parse(text);
  result["param_groups"] = std::move(merged);
  return result.dump(2);
}

}  // namespace trireme
