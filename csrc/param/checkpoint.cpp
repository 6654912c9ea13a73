#include <trireme/param/checkpoint.h>

#include <trireme/comm/gather_texts.h>

#include <ATen/ATen.h>

#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kModel = "model";
constexpr const char* kOptimizer = "optimizer";
constexpr char kFine = '-', kValueError = 'v', kError = 'e';

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) {
  return std::string(c10::toString(dtype)) + " of sizes " + c10::str(sizes);
}

std::vector<std::string> gather(const std::string& own, const CheckpointRanks& ranks) {
  if (!ranks.communicator) return {own};
  return gather_texts(own, *ranks.communicator, ranks.device);
}

std::string random_name() {
  std::random_device source;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

// What one rank tells the others of its content.
std::string content_text(const CheckpointContent& content, const CheckpointRanks& ranks) {
  Json all;
  all["save"] = random_name();
  all["tensors"] = Json::object();
  all["texts"] = Json::object();
  for (const auto& [kind, tensors] : content.tensors) {
    Json& rows = all["tensors"][kind] = Json::array();
    for (const CheckpointTensor& one : tensors) {
      TORCH_CHECK_VALUE(!safetensors_dtype(one.dtype).empty(),
                        error_text("checkpoint",
                                   "got '" + one.name + "' as " + describe(one.dtype, one.sizes) +
                                       ", for which safetensors has no name",
                                   ranks.where(), "Keep it as real numbers, or in `extra`."));
      const int64_t own = one.part.values.defined() ? one.part.values.numel() : 0;
      rows.push_back({one.name, static_cast<int>(one.dtype), one.sizes, own});
    }
  }
  for (const auto& [name, text] : content.texts) all["texts"][name] = Json::parse(text);
  return all.dump();
}

// What all ranks together save.
struct Agreed {
  std::string save;
  std::map<std::string, std::vector<SafetensorsEntry>> tensors;  // by kind
  std::map<std::string, Json> texts;
};

// One kind of tensors, from what ranks know of it.
class Merge {
 public:
  explicit Merge(RankOf where) : where_(where) {}

  void add(const Json& rows, size_t rank) {
    for (const Json& row : rows) {
      SafetensorsEntry entry{row.at(0).get<std::string>(),
                             static_cast<at::ScalarType>(row.at(1).get<int>()),
                             row.at(2).get<std::vector<int64_t>>(), 0};
      const auto [known, is_first] = known_.try_emplace(entry.name, entries_.size(), rank, 0);
      if (is_first) entries_.push_back(entry);
      const SafetensorsEntry& first = entries_[known->second.index];
      if (!(first == entry))
        refuse("'" + entry.name + "' as " + describe(entry.dtype, entry.sizes) + " on rank " +
               std::to_string(rank) + " and as " + describe(first.dtype, first.sizes) +
               " on rank " + std::to_string(known->second.rank));
      known->second.numel += row.at(3).get<int64_t>();
    }
  }

  std::vector<SafetensorsEntry> finish() {
    for (const SafetensorsEntry& entry : entries_) {
      const int64_t numel = known_.at(entry.name).numel;
      if (numel != entry.numel())
        refuse(std::to_string(numel) + " elements of '" + entry.name +
               "' from all ranks, expected " + std::to_string(entry.numel()));
    }
    return std::move(entries_);
  }

 private:
  struct Known {
    Known(size_t place, size_t first_rank, int64_t count)
        : index(place), rank(first_rank), numel(count) {}
    size_t index;
    size_t rank;
    int64_t numel;
  };

  void refuse(const std::string& got) const {
    TORCH_CHECK_VALUE(
        false, error_text("checkpoint", "got " + got, where_, "Save the same model on all ranks."));
  }

  RankOf where_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, Known> known_;
};

Agreed agree(const CheckpointContent& content, const CheckpointRanks& ranks) {
  std::string own;
  together(ranks, [&] { own = content_text(content, ranks); });
  std::vector<Json> all;
  for (const std::string& text : gather(own, ranks)) all.push_back(Json::parse(text));
  Agreed agreed;
  agreed.save = all.front().at("save").get<std::string>();
  std::map<std::string, Merge> merged;
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [kind, rows] : all[rank].at("tensors").items())
      merged.try_emplace(kind, ranks.where()).first->second.add(rows, rank);
  for (auto& [kind, tensors] : merged) agreed.tensors[kind] = tensors.finish();
  for (auto of_rank = all.rbegin(); of_rank != all.rend(); ++of_rank) {  // so the lowest is right
    for (const auto& [name, text] : of_rank->at("texts").items()) {
      Json& known = agreed.texts.try_emplace(name, Json::object()).first->second;
      known.update(text, /*merge_objects=*/true);
    }
  }
  return agreed;
}

void write_parts(const CheckpointFiles& files, const std::vector<CheckpointTensor>& own,
                 const std::string& folder, RankOf where) {
  std::map<std::string, const CheckpointTensor*> by_name;
  for (const CheckpointTensor& one : own)
    if (one.part.values.defined() && one.part.values.numel() > 0) by_name[one.name] = &one;
  for (const auto& [name, header] : files.files) {
    const auto file = SafetensorsFile::open_to_write(folder + "/" + name, header, where);
    bool has_written = false;
    for (const SafetensorsEntry& entry : header.entries) {
      const auto found = by_name.find(entry.name);
      if (found == by_name.end()) continue;
      file.write(entry, found->second->part);
      has_written = true;
    }
    if (has_written || where.rank == 0) file.sync();
  }
}

std::string text_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

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

}  // namespace

void together(const CheckpointRanks& ranks, const std::function<void()>& work) {
  std::exception_ptr own;
  std::string told(1, kFine);
  try {
    work();
  } catch (const c10::ValueError& error) {
    own = std::current_exception();
    told = kValueError + text_of(error);
  } catch (const std::exception& error) {
    own = std::current_exception();
    told = kError + text_of(error);
  }
  const std::vector<std::string> all = gather(told, ranks);
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == kFine) continue;
    const std::string text = error_text(
        "checkpoint", "rank " + std::to_string(rank) + " could not go on: " + all[rank].substr(1),
        ranks.where(), "Mend what it says, and call this again on all ranks.");
    TORCH_CHECK_VALUE(all[rank].front() != kValueError, text);
    TORCH_CHECK(false, text);
  }
}

void save_checkpoint(const SaveCheckpointRequest& request, const CheckpointRanks& ranks) {
  const RankOf where = ranks.where();
  Agreed agreed = agree(request.content, ranks);
  std::map<std::string, CheckpointFiles> planned;
  std::map<std::string, std::string> texts;
  for (auto& [kind, tensors] : agreed.tensors) {
    planned[kind] =
        plan_checkpoint_files(kind, agreed.save, std::move(tensors), request.max_file_bytes);
    texts[index_name(kind)] = index_text(planned[kind]);
  }
  for (const auto& [name, text] : agreed.texts) texts[name] = text.dump(2) + "\n";

  const CheckpointFolder folder(request.path, where);
  const bool is_first = where.rank == 0;
  bool has_begun = false;
  try {
    together(ranks, [&] {
      if (!is_first) return;
      folder.begin();
      has_begun = true;
      for (const auto& [kind, files] : planned) folder.create(files);
    });
    together(ranks, [&] {
      for (const auto& [kind, own] : request.content.tensors)
        write_parts(planned.at(kind), own, folder.staging(), where);
    });
    together(ranks, [&] {
      if (is_first) folder.commit(texts);
    });
  } catch (...) {
    if (has_begun) folder.abandon();
    throw;
  }
}

CheckpointReader::CheckpointReader(const std::string& path, CheckpointRanks ranks)
    : ranks_(std::move(ranks)) {
  together(ranks_, [&] {
    folder_ = find_checkpoint(path, ranks_.where());
    open(kModel);
    if (std::filesystem::exists(folder_ + "/" + index_name(kOptimizer))) open(kOptimizer);
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
  const std::vector<std::string> all = gather(own, ranks_);
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
      if (expected.count(name) == 0)
        refuse("'" + name + "' in '" + folder_ + "', which the model does not have",
               "Load a checkpoint of the same model.");
  });
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
