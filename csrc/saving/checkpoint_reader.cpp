#include <trireme/common/error.h>
#include <trireme/saving/checkpoint.h>

#include <ATen/ATen.h>

#include <filesystem>
#include <sstream>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

// "'a' and 3 more": what a file holds.
std::string held_by(const std::string& file, const CheckpointIndex& index) {
  std::string first;
  size_t more = 0;
  for (const auto& [tensor, place] : index.weight_map) {
    if (place != file) continue;
    if (first.empty()) {
      first = tensor;
    } else {
      ++more;
    }
  }
  return "'" + first + "'" + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

// The first of the lines that all ranks say; empty if there is none. Ranks may have other parts of
// a model under other names (experts).
std::string foreign_to_all(const std::string& own, const CheckpointRanks& ranks) {
  const std::vector<std::string> said = gather_texts(own, ranks);
  std::map<std::string, size_t> counts;
  for (const std::string& names : said) {
    std::istringstream lines(names);
    for (std::string name; std::getline(lines, name);) ++counts[name];
  }
  for (const auto& [name, count] : counts)
    if (count == said.size()) return name;
  return {};
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path, CheckpointRanks ranks)
    : ranks_(std::move(ranks)) {
  together(ranks_, [&] {
    folder_ = find_checkpoint(path, ranks_.where());
    open(kModelTensors);
    if (std::filesystem::exists(folder_ + "/" + index_name(kOptimizerTensors)))
      open(kOptimizerTensors);
  });
  together(ranks_, [&] { compare_saves(); });
}

void CheckpointReader::open(const std::string& kind) {
  const CheckpointIndex index = read_index(folder_ + "/" + index_name(kind), ranks_.where());
  Kind opened;
  opened.save = index.save;
  std::map<std::string, int64_t> names = index.file_bytes;
  for (const auto& [tensor, name] : index.weight_map) names.try_emplace(name, -1);
  for (const auto& [name, expected] : names) {
    const std::string path = folder_ + "/" + name;
    const std::string holding = "', which holds " + held_by(name, index);
    std::error_code missing;
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, missing));
    const std::string restore = "Restore the file, or load another checkpoint.";
    if (missing) refuse("no file '" + path + holding, restore);
    if (expected >= 0 && bytes != expected)
      refuse(std::to_string(bytes) + " bytes in '" + path + holding + ", expected " +
                 std::to_string(expected),
             restore);
    take(opened, index, SafetensorsFile::open(path, ranks_.where()), name);
  }
  for (const auto& [tensor, name] : index.weight_map)
    if (opened.tensors.count(tensor) == 0)
      refuse("no '" + tensor + "' in '" + name + "', where the index has it",
             "Restore the file, or load another checkpoint.");
  kinds_[kind] = std::move(opened);
}

void CheckpointReader::take(Kind& opened, const CheckpointIndex& index, SafetensorsFile file,
                            const std::string& name) const {
  if (!index.save.empty()) {
    const auto said = file.header().metadata.find("trireme");
    const std::string found = said == file.header().metadata.end() ? "none" : said->second;
    if (found != index.save + "/" + name)
      refuse("a file of another save in '" + folder_ + "/" + name + "', which holds " +
                 held_by(name, index) + ": " + found + ", expected " + index.save + "/" + name,
             "Restore the file, or load another checkpoint.");
  }
  const std::vector<SafetensorsEntry>& entries = file.header().entries;
  for (size_t i = 0; i < entries.size(); ++i) {
    const SafetensorsEntry& entry = entries[i];
    const auto place = index.weight_map.find(entry.name);
    if (place == index.weight_map.end() || place->second != name) continue;
    opened.places[entry.name] = {opened.files.size(), i};
    opened.tensors[entry.name] = {entry.name, entry.dtype, entry.sizes};
  }
  opened.files.push_back(std::move(file));
}

// Hosts may see different disks under one path.
void CheckpointReader::compare_saves() const {
  std::string own;
  for (const auto& [kind, opened] : kinds_) own += kind + " " + opened.save + " ";
  const std::vector<std::string> all = gather_texts(own, ranks_);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != all.front())
      refuse("another checkpoint on rank " + std::to_string(rank) + " than on rank 0 in '" +
                 folder_ + "'",
             "Load from a disk that every rank sees.");
}

const std::map<std::string, CheckpointTensor>& CheckpointReader::tensors(
    const std::string& kind) const {
  static const std::map<std::string, CheckpointTensor> none;
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? none : found->second.tensors;
}

std::string CheckpointReader::text(const std::string& name) const {
  const std::string path = folder_ + "/" + name;
  return std::filesystem::exists(path) ? read_text(path, ranks_.where()) : "";
}

void CheckpointReader::check_one(const Kind& opened, const CheckpointTensor& tensor) const {
  const std::string load = "Load a checkpoint of the same model.";
  const auto found = opened.tensors.find(tensor.name);
  if (found == opened.tensors.end())
    refuse("a checkpoint without '" + tensor.name + "' in '" + folder_ + "'", load);
  const CheckpointTensor& saved = found->second;
  if (saved.dtype != tensor.dtype || saved.sizes != tensor.sizes)
    refuse("'" + tensor.name + "' as " + describe(saved.dtype, saved.sizes) + " in '" + folder_ +
               "', expected " + describe(tensor.dtype, tensor.sizes),
           load);
}

void CheckpointReader::check(const std::string& kind,
                             const std::vector<CheckpointTensor>& tensors) const {
  std::string foreign;  // to this rank: names, a line each
  together(ranks_, [&] {
    const auto opened = kinds_.find(kind);
    if (opened == kinds_.end())
      refuse("a checkpoint without " + kind + " in '" + folder_ + "'", "Load another one.");
    std::map<std::string, bool> expected;
    for (const CheckpointTensor& one : tensors) {
      check_one(opened->second, one);
      expected[one.name] = true;
    }
    for (const auto& [name, saved] : opened->second.tensors)
      if (expected.count(name) == 0) foreign += name + '\n';
  });
  const std::string name = foreign_to_all(foreign, ranks_);
  if (!name.empty())
    refuse("'" + name + "' in '" + folder_ + "', which the model does not have",
           "Load a checkpoint of the same model.");
}

void CheckpointReader::read(const std::string& kind,
                            const std::vector<CheckpointTensor>& tensors) const {
  together(ranks_, [&] {
    if (tensors.empty()) return;
    const Kind& opened = kinds_.at(kind);
    for (const CheckpointTensor& one : tensors) {
      check_one(opened, one);
      const Place place = opened.places.at(one.name);
      const SafetensorsFile& file = opened.files[place.file];
      file.read(file.header().entries[place.entry], one.part);
    }
  });
}

void CheckpointReader::refuse(const std::string& got, const std::string& next_step) const {
  TORCH_CHECK_VALUE(false, error_text("checkpoint", "got " + got, ranks_.where(), next_step));
}

}  // namespace trireme
