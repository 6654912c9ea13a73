#include <trireme/strategies/remote/definitions.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>
#include <utility>

namespace trireme::remote {
namespace {

constexpr char kField = '\x1f';
constexpr size_t kFields = 7;

bool is_printable(std::string_view text) {
  return std::none_of(text.begin(), text.end(), [](char letter) {
    return std::iscntrl(static_cast<unsigned char>(letter)) != 0;
  });
}

std::string describe(const DefinitionText& definition) {
  std::string text = definition.kind + " " + definition.name + definition.parameters + " of " +
                     definition.language;
  if (definition.batch > 0) text += " with batch=" + std::to_string(definition.batch);
  return text;
}

// Parameters of two languages have no common text; if both their numbers are known they have to
// match.
bool agree(const DefinitionText& a, const DefinitionText& b) {
  if (a.kind != b.kind || a.batch != b.batch) return false;
  if (a.language == b.language) return a.parameters == b.parameters;
  return a.count < 0 || b.count < 0 || a.count == b.count;
}

}  // namespace

const char* text_of(Definition::Kind kind) {
  switch (kind) {
    case Definition::Kind::kFunction:
      return "function";
    case Definition::Kind::kClass:
      return "class";
    default:
      return "method";
  }
}

std::string Definition::text() const {
  std::string found = name;
  for (const std::string& field : {std::string(text_of(kind)), language, parameters,
                                   std::to_string(count), std::to_string(batch)})
    found += kField + field;
  return found;
}

Definitions& Definitions::of_process() {
  static auto* all = new Definitions;  // threads of an endpoint may outlive static objects
  return *all;
}

void Definitions::add(Definition definition) {
  TORCH_CHECK_VALUE(!definition.name.empty() && is_printable(definition.name),
                    error_text("remote", "got a definition with the name '" + definition.name + "'",
                               {}, "Give it a name that can be printed."));
  TORCH_CHECK_VALUE(definition.batch >= 0,
                    error_text("remote",
                               "got batch=" + std::to_string(definition.batch) + " of " +
                                   definition.name + ", expected at least 1",
                               {}, "Leave it out for none."));
  std::replace_if(
      definition.parameters.begin(), definition.parameters.end(),
      [](char letter) { return std::iscntrl(static_cast<unsigned char>(letter)) != 0; }, ' ');
  const std::lock_guard lock(mutex_);
  auto& same = all_[definition.name];
  const std::string place = definition.place;
  const auto there = std::find_if(same.begin(), same.end(), [&](const auto& known) {
    return !place.empty() && known->place == place;
  });
  auto made = std::make_shared<const Definition>(std::move(definition));
  if (there == same.end()) {
    same.push_back(std::move(made));
  } else {
    *there = std::move(made);
  }
}

std::shared_ptr<const Definition> Definitions::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(name);
  return found == all_.end() ? nullptr : found->second.back();
}

std::vector<std::string> Definitions::names(Definition::Kind kind) const {
  std::vector<std::string> names;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, same] : all_)
    if (same.back()->kind == kind) names.push_back(name);
  return names;
}

std::vector<std::string> Definitions::texts() const {
  std::vector<std::string> texts;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, same] : all_)
    texts.push_back(same.back()->text() + kField + (same.size() > 1 ? "1" : "0"));
  return texts;
}

std::vector<DefinitionText> read_definitions(const std::string& text) {
  std::vector<DefinitionText> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::array<std::string, kFields> fields;
    std::istringstream parts(line);
    for (std::string& field : fields) std::getline(parts, field, kField);
    found.push_back({fields[0], fields[1], fields[2], fields[3], std::stoll(fields[4]),
                     std::stoll(fields[5]), fields[6] == "1"});
  }
  return found;
}

std::string difference_of(const std::vector<std::vector<DefinitionText>>& by_rank,
                          const std::vector<std::string>& names) {
  std::map<std::string, std::pair<size_t, const DefinitionText*>> first;
  const auto on_rank = [&](size_t rank) {
    return " at '" + names[rank] + "' (rank " + std::to_string(rank) + ")";
  };
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const DefinitionText& own : by_rank[rank]) {
      if (own.is_double)
        return "got two definitions of the " + own.kind + " " + own.name + on_rank(rank);
      const auto [there, is_new] = first.try_emplace(own.name, rank, &own);
      if (!is_new && !agree(*there->second.second, own))
        return "got the " + describe(*there->second.second) + on_rank(there->second.first) +
               ", and the " + describe(own) + on_rank(rank);
    }
  }
  return {};
}

std::string list_of(const std::vector<std::string>& names) {
  if (names.empty()) return "nothing";
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += "'" + names[i] + "'";
  }
  return text;
}

}  // namespace trireme::remote
