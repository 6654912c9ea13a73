#include <trireme/saving/checkpoint_files.h>

#include <trireme/saving/checksum.h>
#include <trireme/saving/json_text.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

// See [Note: a checkpoint is a folder whose index names every file in it] in checkpoint_files.h.

namespace trireme {
namespace {

constexpr const char* kIndexSuffix = ".safetensors.index.json";
constexpr const char* kFileSuffix = ".safetensors";
constexpr const char* kOurs = "trireme";
constexpr const char* kOtherBytes = "other_file_bytes";
constexpr const char* kChunkSize = "chunk_bytes";
constexpr const char* kChecksums = "chunk_checksums";
constexpr const char* kOtherChecksums = "other_file_checksums";
// How a text ends that has a checksum of itself: the last member of the last object.
constexpr std::string_view kTailBegin = ",\n      \"checksum\": \"";
constexpr std::string_view kTailEnd = "\"\n    }\n  }\n}\n";
constexpr size_t kDigits = 16;

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

using Ordered = nlohmann::ordered_json;

// Adds the checksums of the files of an index to its metadata.
void add_checksums(const CheckpointFiles& files, const ChunkChecksums& checksums, Ordered& ours) {
  if (checksums.empty()) return;
  ours[kChunkSize] = kChunkBytes;
  Ordered& by_file = ours[kChecksums] = Ordered::object();
  for (const auto& [name, header] : files.files) {
    Ordered& texts = by_file[name] = Ordered::array();
    for (const uint64_t checksum : checksums.at(name)) texts.push_back(checksum_text(checksum));
  }
}

// Returns the text of an index with a checksum of itself.
std::string with_own_checksum(const std::string& text) {
  const size_t end = text.size() - (kTailEnd.size() - 1);  // without the quote
  std::string whole = text.substr(0, end);
  whole.append(kTailBegin).append(checksum_text(checksum_of(text))).append(kTailEnd);
  return whole;
}

// Returns the checksum at the end of an index's text; nothing if it has none.
std::optional<uint64_t> own_checksum(std::string_view text) {
  const size_t tail = kTailBegin.size() + kDigits + kTailEnd.size();
  if (text.size() < tail || !text.ends_with(kTailEnd)) return std::nullopt;
  text.remove_prefix(text.size() - tail);
  if (!text.starts_with(kTailBegin)) return std::nullopt;
  return checksum_from(text.substr(kTailBegin.size(), kDigits));
}

// Returns whether an index's text, which ends with a checksum of itself, is the one that was saved.
bool is_as_saved(const std::string& text, uint64_t checksum) {
  const size_t tail = kTailBegin.size() + kDigits + kTailEnd.size();
  return checksum_of(text.substr(0, text.size() - tail) + std::string(kTailEnd.substr(1))) ==
         checksum;
}

// Returns the text of an index. `ours`: metadata of ours beyond Hugging Face's.
std::string index_text(const CheckpointFiles& files, Ordered ours) {
  int64_t total_bytes = 0;
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, header] : files.files) {
    total_bytes += header.file_bytes - header.bytes;
    for (const SafetensorsEntry& entry : header.entries)
      weight_map[to_safetensors_name(entry.name)] = name;
  }
  Ordered index;
  index["weight_map"] = weight_map;
  index["metadata"] = {{"total_size", total_bytes}, {kOurs, std::move(ours)}};
  return with_own_checksum(index.dump(2) + "\n");
}

// Returns whether `name` is a file directly in the folder. The file may be a symbolic link: in
// Hugging Face's cache all are.
bool is_in_folder(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

uint64_t parse_checksum(const nlohmann::json& text) {
  const auto checksum = checksum_from(text.get<std::string>());
  TORCH_CHECK_VALUE(checksum.has_value(), "a checksum of other digits");
  return *checksum;
}

void parse_checksums(const nlohmann::json& ours, CheckpointIndex& index) {
  if (!ours.contains(kChecksums)) return;
  index.chunk_bytes = ours.at(kChunkSize).get<int64_t>();
  for (const auto& [name, texts] : ours.at(kChecksums).items())
    for (const auto& text : texts) index.checksums[name].push_back(parse_checksum(text));
  if (!index.names_all) return;
  for (const auto& [name, text] : ours.at(kOtherChecksums).items())
    index.other_checksums[name] = parse_checksum(text);
}

// Returns whether an index has as many checksums as its files have chunks.
bool has_all_checksums(const CheckpointIndex& index) {
  if (index.chunk_bytes <= 0) return false;
  return std::all_of(index.file_bytes.begin(), index.file_bytes.end(), [&](const auto& file) {
    const auto found = index.checksums.find(file.first);
    return found != index.checksums.end() &&
           found->second.size() == count_chunks(file.second, index.chunk_bytes);
  });
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
  parse_checksums(ours, index);
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

std::map<std::string, std::string> index_texts(const SavingPlan& plan, const std::string& replaces,
                                               const ChunkChecksums& checksums) {
  std::map<std::string, std::string> texts;
  BytesByFile others;
  std::map<std::string, std::string> other_checksums;
  const auto add_text = [&](const std::string& name, const std::string& text) {
    others[name] = static_cast<int64_t>(text.size());
    other_checksums[name] = checksum_text(checksum_of(text));
  };
  for (const auto& [name, text] : plan.texts) add_text(name, text);
  for (const auto& [kind, files] : plan.kinds) {
    if (kind == kModelTensors) continue;
    const std::string name = index_name(kind);
    Ordered ours{{"save", files.save}, {"file_bytes", bytes_of(files)}};
    add_checksums(files, checksums, ours);
    texts[name] = index_text(files, std::move(ours));
    add_text(name, texts[name]);
    others.merge(bytes_of(files));
  }
  const CheckpointFiles& model = plan.kinds.at(kModelTensors);
  Ordered ours{{"save", model.save},
               {"replaces", replaces},
               {"file_bytes", bytes_of(model)},
               {kOtherBytes, others}};
  add_checksums(model, checksums, ours);
  if (!checksums.empty()) ours[kOtherChecksums] = other_checksums;
  texts[index_name(kModelTensors)] = index_text(model, std::move(ours));
  return texts;
}

CheckpointIndex read_index(const std::string& path, RankOf where, Verify verify) {
  const std::string text = read_json_file(path, where);
  const auto refuse = [&](const std::string& got) {
    TORCH_CHECK_VALUE(false, error_text("saving", "got " + got, where,
                                        "Restore the file, or load another checkpoint."));
  };
  const auto refuse_changed = [&] {
    refuse("an index in '" + path + "' whose bytes are not those that were saved");
  };
  const auto own = own_checksum(text);
  if (verify == Verify::kYes && own && !is_as_saved(text, *own)) refuse_changed();
  CheckpointIndex index;
  try {
    index = parse_index(text);
  } catch (const nlohmann::json::exception& error) {
    refuse("no index in '" + path + "': " + error.what());
  } catch (const c10::ValueError& error) {
    refuse("no index in '" + path + "': " + error.what_without_backtrace());
  }
  // One changed byte hides one of the two at most.
  if (verify == Verify::kYes && index.chunk_bytes != 0 && !(own && has_all_checksums(index)))
    refuse_changed();
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
