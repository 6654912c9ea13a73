#include <trireme/saving/checkpoint_files.h>

#include <trireme/saving/json_text.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <utility>

// See [Note: a checkpoint is a folder whose index names every file in it] in checkpoint_files.h.

namespace trireme {
namespace {

constexpr const char* kIndexSuffix = ".safetensors.index.json";
constexpr const char* kFileSuffix = ".safetensors";
constexpr const char* kOurs = "trireme";
constexpr const char* kOtherBytes = "other_file_bytes";

using BytesByFile = std::map<std::string, int64_t>;

std::string file_name(const std::string& kind, size_t number, size_t count) {
  char numbers[32];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu", number, count);
  return kind + numbers + kFileSuffix;
}

BytesByFile bytes_of(const CheckpointFiles& files) {
  BytesByFile bytes;
  for (const auto& [name, header] : files.files) bytes[name] = header.file_bytes;
  return bytes;
}

// Returns the text of an index. `ours`: metadata of ours beyond Hugging Face's.
std::string index_text(const CheckpointFiles& files, nlohmann::ordered_json ours) {
  int64_t total_bytes = 0;
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, header] : files.files) {
    total_bytes += header.file_bytes - header.bytes;
    for (const SafetensorsEntry& entry : header.entries)
      weight_map[to_safetensors_name(entry.name)] = name;
  }
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_size", total_bytes}, {kOurs, std::move(ours)}};
  index["weight_map"] = weight_map;
  return index.dump(2) + "\n";
}

// Returns whether `name` is a file directly in the folder. The file may be a symbolic link: in
// Hugging Face's cache all are.
bool is_in_folder(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

CheckpointIndex parse_index(const std::string& text) {
  CheckpointIndex index;
  const auto parsed = nlohmann::json::parse(text);
  for (const auto& [name, file] : parsed.at("weight_map").get<std::map<std::string, std::string>>())
    index.weight_map[from_safetensors_name(name)] = file;
  const auto metadata = parsed.find("metadata");
  if (metadata == parsed.end() || !metadata->contains(kOurs)) return index;
  const auto& ours = metadata->at(kOurs);
  index.save = ours.at("save").get<std::string>();
  index.file_bytes = ours.at("file_bytes").get<BytesByFile>();
  index.names_all = ours.contains(kOtherBytes);
  if (index.names_all) {
    index.other_bytes = ours.at(kOtherBytes).get<BytesByFile>();
    index.replaces = ours.at("replaces").get<std::string>();
  }
  return index;
}

}  // namespace

std::string index_name(const std::string& kind) { return kind + kIndexSuffix; }

CheckpointFiles plan_checkpoint_files(const std::string& kind, const std::string& save,
                                      std::vector<SafetensorsEntry> tensors,
                                      int64_t max_file_bytes) {
  std::vector<std::vector<SafetensorsEntry>> parts;
  int64_t room = 0;
  for (SafetensorsEntry& tensor : tensors) {
    const int64_t bytes = tensor.bytes();
    if (parts.empty() || (bytes > room && !parts.back().empty())) {
      parts.emplace_back();
      room = max_file_bytes;
    }
    room -= bytes;
    parts.back().push_back(std::move(tensor));
  }
  CheckpointFiles files{kind, save, {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = file_name(kind, i + 1, parts.size());
    // Other programs look for "format"; "pt" stands for torch's tensors.
    files.files[name] =
        plan_safetensors(std::move(parts[i]), {{"format", "pt"}, {kOurs, save + "/" + name}});
  }
  return files;
}

std::map<std::string, std::string> index_texts(const SavingPlan& plan,
                                               const std::string& replaces) {
  std::map<std::string, std::string> texts;
  BytesByFile others;
  for (const auto& [name, text] : plan.texts) others[name] = static_cast<int64_t>(text.size());
  for (const auto& [kind, files] : plan.kinds) {
    if (kind == kModelTensors) continue;
    const std::string name = index_name(kind);
    texts[name] = index_text(files, {{"save", files.save}, {"file_bytes", bytes_of(files)}});
    others[name] = static_cast<int64_t>(texts[name].size());
    others.merge(bytes_of(files));
  }
  const CheckpointFiles& model = plan.kinds.at(kModelTensors);
  texts[index_name(kModelTensors)] = index_text(model, {{"save", model.save},
                                                        {"replaces", replaces},
                                                        {"file_bytes", bytes_of(model)},
                                                        {kOtherBytes, others}});
  return texts;
}

CheckpointIndex read_index(const std::string& path, RankOf where) {
  const std::string text = read_json_file(path, where);
  const auto refuse = [&](const std::string& got) {
    TORCH_CHECK_VALUE(false, error_text("saving", "got " + got, where,
                                        "Restore the file, or load another checkpoint."));
  };
  CheckpointIndex index;
  try {
    index = parse_index(text);
  } catch (const nlohmann::json::exception& error) {
    refuse("no index in '" + path + "': " + error.what());
  }
  std::set<std::string> names = file_names(index);
  for (const auto& [tensor, file] : index.weight_map) names.insert(file);
  for (const std::string& name : names)
    if (!is_in_folder(name))
      refuse(nlohmann::json(name).dump(-1, ' ', true) + " as the name of a file in '" + path +
             "', expected one in its folder");
  return index;
}

std::set<std::string> file_names(const CheckpointIndex& index) {
  std::set<std::string> names;
  for (const auto* files : {&index.file_bytes, &index.other_bytes})
    for (const auto& [name, bytes] : *files) names.insert(name);
  names.insert(index_name(kModelTensors));
  return names;
}

std::string read_json_file(const std::string& path, RankOf where) {
  const std::string next_step = "Restore the file, or load another checkpoint.";
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(path, ignored);
  const std::ifstream file(is_file ? path : "", std::ios::binary);
  TORCH_CHECK_VALUE(file.good(),
                    error_text("saving", "got no file '" + path + "'", where, next_step));
  std::ostringstream text;
  text << file.rdbuf();
  try {
    check_json(text.str());
  } catch (const JsonTextError& error) {
    TORCH_CHECK_VALUE(
        false, error_text("saving", "got no usable JSON object in '" + path + "': " + error.what(),
                          where, next_step));
  }
  return text.str();
}

}  // namespace trireme
