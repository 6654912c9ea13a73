#include <trireme/saving/checkpoint_source.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <set>

namespace trireme {
namespace {

constexpr const char* kLoad = "Load a checkpoint of the same model.";

// Returns a name that is in the lists of all ranks; empty if there is none. Ranks may have
// different parts of a model under different names (experts).
std::string foreign_to_all(const std::vector<std::string>& own, const CheckpointRanks& ranks) {
  const std::string text = own.empty() ? "" : nlohmann::json(own).dump();
  const std::vector<std::string> said = gather_texts(text, ranks);
  std::map<std::string, size_t> counts;
  for (const std::string& names : said)
    if (!names.empty())
      for (const auto& name : nlohmann::json::parse(names)) ++counts[name.get<std::string>()];
  for (const auto& [name, count] : counts)
    if (count == said.size()) return name;
  return {};
}

}  // namespace

void CheckpointSource::check_one(const std::string& kind, const CheckpointTensor& tensor) const {
  const auto& known = tensors(kind);
  const auto found = known.find(tensor.name);
  if (found == known.end()) refuse("a checkpoint without '" + tensor.name + "' " + place(), kLoad);
  const CheckpointTensor& saved = found->second;
  if (saved.dtype != tensor.dtype || saved.sizes != tensor.sizes)
    refuse("'" + tensor.name + "' as " + describe(saved.dtype, saved.sizes) + " " + place() +
               ", expected " + describe(tensor.dtype, tensor.sizes),
           kLoad);
}

void CheckpointSource::check(const std::string& kind,
                             const std::vector<CheckpointTensor>& tensors) const {
  std::vector<std::string> foreign;  // names that this rank does not have
  together(ranks_, [&] {
    if (!has(kind)) refuse("a checkpoint without " + kind + " " + place(), "Load another one.");
    std::set<std::string> expected;
    for (const CheckpointTensor& tensor : tensors) {
      check_one(kind, tensor);
      expected.insert(tensor.name);
    }
    for (const auto& [name, saved] : this->tensors(kind))
      if (expected.count(name) == 0) foreign.push_back(name);
  });
  const std::string name = foreign_to_all(foreign, ranks_);
  if (!name.empty()) refuse("'" + name + "' " + place() + ", which the model does not have", kLoad);
}

void CheckpointSource::refuse(const std::string& got, const std::string& next_step) const {
  TORCH_CHECK_VALUE(false, error_text("saving", "got " + got, ranks_.where(), next_step));
}

}  // namespace trireme
