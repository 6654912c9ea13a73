#include <trireme/saving/checkpoint_reader.h>

#include <trireme/comm/agree.h>
#include <trireme/common/error.h>
#include <trireme/kernels/cpu/parallel.h>
#include <trireme/saving/checksum.h>
#include <trireme/saving/content_text.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/saving/part_exchange.h>
#include <trireme/saving/redistribute_plan.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <unordered_map>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

// Returns the tensors of a file, as in "'a' and 3 more".
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

constexpr const char* kRestore = "Restore the file, or load another checkpoint.";

// Returns tensors as the dtypes of their memory: what ranks exchange once it was read.
std::vector<CheckpointTensor> as_they_lie(std::vector<CheckpointTensor> tensors) {
  for (CheckpointTensor& tensor : tensors)
    if (tensor.part.values.defined()) tensor.dtype = tensor.part.values.scalar_type();
  return tensors;
}

std::set<std::string> names_in(const PlacesByRank& places) {
  std::set<std::string> names;
  for (const auto& of_rank : places)
    for (const TensorPlace& place : of_rank) names.insert(place.name);
  return names;
}

PlacesByRank only(PlacesByRank places, const std::set<std::string>& names) {
  for (auto& of_rank : places)
    std::erase_if(of_rank, [&](const TensorPlace& it) { return names.count(it.name) == 0; });
  return places;
}

std::vector<CheckpointTensor> tensors_named(std::vector<CheckpointTensor> tensors,
                                            const std::set<std::string>& names, bool is_in) {
  std::erase_if(tensors,
                [&](const CheckpointTensor& it) { return (names.count(it.name) > 0) != is_in; });
  return tensors;
}

// Returns the parts of `tensors` at these places.
std::vector<CheckpointTensor> parts_at(const std::vector<TensorPlace>& places,
                                       const std::vector<CheckpointTensor>& tensors) {
  std::unordered_map<std::string, const CheckpointTensor*> by_name;
  for (const CheckpointTensor& tensor : tensors) by_name[tensor.name] = &tensor;
  std::vector<CheckpointTensor> parts;
  for (const TensorPlace& place : places) {
    const TensorPart& part = by_name.at(place.name)->part;
    const at::Tensor values = values_in(part.values.detach(), part.first, *place.box);
    parts.push_back({place.name, place.dtype, place.sizes, {values, place.box->first}});
  }
  return parts;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path, CheckpointRanks ranks,
                                   const ReadOptions& options)
    : CheckpointSource(std::move(ranks)), options_(options) {
  together(ranks_, [&] {
    const CheckpointPlace place = find_checkpoint(path, ranks_.where());
    folder_ = place.folder;
    open_all(place);
  });
  together(ranks_, [&] { compare_saves(); });
}

void CheckpointReader::open_all(const CheckpointPlace& place) {
  const auto is_there = [&](const std::string& name) {
    return std::filesystem::exists(folder_ + "/" + name);
  };
  const std::string only = std::string(kModelTensors) + ".safetensors";
  const std::string name = index_name(kModelTensors);
  if (!place.file.empty()) return open(kModelTensors, index_of_one(place.file));
  if (!is_there(name) && is_there(only)) return open(kModelTensors, index_of_one(only));

  const CheckpointIndex model = read_index(folder_ + "/" + name, ranks_.where(), options_.verify);
  open(kModelTensors, model);
  check_others(model);
  const auto belongs = [&](const std::string& other) {
    return model.names_all ? model.other_bytes.count(other) > 0 : is_there(other);
  };
  for (const char* kind : {kOptimizerTensors, kCompressionTensors, kRoundsTensors, kRandomTensors,
                           kFrozenTensors, kTableTensors}) {
    const std::string other = index_name(kind);
    if (!belongs(other)) continue;
    const CheckpointIndex index =
        read_index(folder_ + "/" + other, ranks_.where(), options_.verify);
    if (index.save != model.save)
      refuse("'" + other + "' of another save in '" + folder_ + "'", kRestore);
    text_at(other, model);  // compares its checksum
    open(kind, index);
  }
  for (const char* text : {kOptimizerText, kExtraText})
    if (belongs(text)) texts_[text] = text_at(text, model);
}

// Returns the text of a JSON file, compared with its checksum.
std::string CheckpointReader::text_at(const std::string& name, const CheckpointIndex& model) const {
  std::string text = read_json_file(folder_ + "/" + name, ranks_.where());
  const auto saved = model.other_checksums.find(name);
  if (options_.verify == Verify::kYes && saved != model.other_checksums.end() &&
      saved->second != checksum_of(text))
    refuse("a text in '" + folder_ + "/" + name + "' whose bytes are not those that were saved",
           kRestore);
  return text;
}

// Makes an index for a single file that another program wrote without one.
CheckpointIndex CheckpointReader::index_of_one(const std::string& file) const {
  CheckpointIndex index;
  const auto opened = SafetensorsFile::open(folder_ + "/" + file, ranks_.where());
  for (const SafetensorsEntry& entry : opened.header().entries) index.weight_map[entry.name] = file;
  return index;
}

// Checks the lengths of the files other than the model's tensors.
void CheckpointReader::check_others(const CheckpointIndex& model) const {
  for (const auto& [name, expected] : model.other_bytes) {
    const int64_t bytes = bytes_of(name, "', which '" + index_name(kModelTensors) + "' names");
    if (bytes != expected)
      refuse(std::to_string(bytes) + " bytes in '" + folder_ + "/" + name + "', expected " +
                 std::to_string(expected),
             kRestore);
  }
}

int64_t CheckpointReader::bytes_of(const std::string& name, const std::string& holding) const {
  const std::string path = folder_ + "/" + name;
  std::error_code missing;
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, missing));
  if (missing) refuse("no file '" + path + holding, kRestore);
  return bytes;
}

void CheckpointReader::open(const std::string& kind, const CheckpointIndex& index) {
  Kind opened;
  opened.save = index.save;
  opened.chunk_bytes = index.chunk_bytes;
  std::map<std::string, int64_t> names = index.file_bytes;
  for (const auto& [tensor, name] : index.weight_map) names.try_emplace(name, -1);
  for (const auto& [name, expected] : names) {
    const std::string path = folder_ + "/" + name;
    const std::string holding = "', which holds " + held_by(name, index);
    const int64_t bytes = bytes_of(name, holding);
    if (expected >= 0 && bytes != expected)
      refuse(std::to_string(bytes) + " bytes in '" + path + holding + ", expected " +
                 std::to_string(expected),
             kRestore);
    take_file(opened, index, open_file(name, index), name);
  }
  for (const auto& [tensor, name] : index.weight_map)
    if (opened.tensors.count(tensor) == 0)
      refuse("no '" + tensor + "' in '" + name + "', where the index has it", kRestore);
  kinds_[kind] = std::move(opened);
}

// Opens a file of tensors. Where it has checksums, a header that cannot be read is a damaged one.
SafetensorsFile CheckpointReader::open_file(const std::string& name,
                                            const CheckpointIndex& index) const {
  try {
    return SafetensorsFile::open(folder_ + "/" + name, ranks_.where());
  } catch (const c10::ValueError& error) {
    if (index.chunk_bytes == 0) throw;
    refuse("a damaged header in '" + folder_ + "/" + name + "', which holds " +
               held_by(name, index) + ": " + error.what_without_backtrace(),
           kRestore);
  }
}

void CheckpointReader::take_file(Kind& opened, const CheckpointIndex& index, SafetensorsFile file,
                                 const std::string& name) const {
  if (!index.save.empty()) {
    const auto said = file.header().metadata.find("trireme");
    const std::string found = said == file.header().metadata.end() ? "none" : said->second;
    if (found != index.save + "/" + name)
      refuse("a file of another save in '" + folder_ + "/" + name + "', which holds " +
                 held_by(name, index) + ": " + found + ", expected " + index.save + "/" + name,
             kRestore);
  }
  const auto checksums = index.checksums.find(name);
  opened.checksums.push_back(checksums == index.checksums.end() ? std::vector<uint64_t>()
                                                                : checksums->second);
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

// Throws unless all ranks see the same save: hosts may see different disks under one path.
void CheckpointReader::compare_saves() const {
  std::string own;
  for (const auto& [kind, opened] : kinds_) own += kind + " " + opened.save + " ";
  if (const auto differs = first_difference(gather_texts(own, ranks_)))
    refuse("another checkpoint on rank " + std::to_string(differs->rank) + " than on rank 0 in '" +
               folder_ + "'",
           "Load from a disk that every rank sees.");
}

bool CheckpointReader::has(const std::string& kind) const { return kinds_.count(kind) > 0; }

const std::map<std::string, CheckpointTensor>& CheckpointReader::tensors(
    const std::string& kind) const {
  static const std::map<std::string, CheckpointTensor> none;
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? none : found->second.tensors;
}

std::string CheckpointReader::text(const std::string& name) const {
  const auto found = texts_.find(name);
  return found == texts_.end() ? "" : found->second;
}

void CheckpointReader::verify(const std::vector<std::string>& kinds) const {
  if (options_.verify == Verify::kNo) return;
  const std::vector<Chunk> chunks = chunks_of(kinds);
  const RankOf where = ranks_.where();
  const auto count = static_cast<int64_t>(chunks.size());
  const int64_t first = count * where.rank / where.world;
  const int64_t end = count * (where.rank + 1) / where.world;
  together(ranks_, [&] {
    cpu::for_ranges(
        end - first,
        [&](int64_t begin, int64_t stop) {
          for (int64_t i = begin; i < stop; ++i)
            check_chunk(chunks[static_cast<size_t>(first + i)]);
        },
        /*grain=*/1);
  });
}

std::vector<CheckpointReader::Chunk> CheckpointReader::chunks_of(
    const std::vector<std::string>& kinds) const {
  std::vector<Chunk> chunks;
  for (const std::string& kind : kinds) {
    const auto found = kinds_.find(kind);
    if (found == kinds_.end() || found->second.chunk_bytes == 0) continue;
    const Kind& opened = found->second;
    for (size_t i = 0; i < opened.files.size(); ++i) {
      int64_t begin = 0;
      for (const uint64_t checksum : opened.checksums[i]) {
        const int64_t end =
            std::min(begin + opened.chunk_bytes, opened.files[i].header().file_bytes);
        chunks.push_back({&opened.files[i], begin, end, checksum});
        begin = end;
      }
    }
  }
  return chunks;
}

void CheckpointReader::check_chunk(const Chunk& chunk) const {
  if (chunk.file->checksum(chunk.begin, chunk.end) == chunk.checksum) return;
  const SafetensorsHeader& header = chunk.file->header();
  std::string tensor = "its header";
  for (const SafetensorsEntry& entry : header.entries) {
    const int64_t begin = header.bytes + entry.begin;
    if (begin >= chunk.end || begin + entry.bytes() <= chunk.begin) continue;
    tensor = "'" + entry.name + "'";
    break;
  }
  refuse("other bytes in '" + chunk.file->path() + "' than were saved, in bytes " +
             std::to_string(chunk.begin) + " to " + std::to_string(chunk.end) + ", which hold " +
             tensor,
         kRestore);
}

void CheckpointReader::read(const std::string& kind,
                            const std::vector<CheckpointTensor>& tensors) const {
  if (options_.once && ranks_.where().world > 1) return read_once(kind, tensors);
  together(ranks_, [&] {
    for (const CheckpointTensor& tensor : tensors) check_one(kind, tensor);
    read_own(kind, tensors);
  });
}

void CheckpointReader::read_own(const std::string& kind,
                                const std::vector<CheckpointTensor>& tensors) const {
  if (tensors.empty()) return;
  const Kind& opened = kinds_.at(kind);
  for (const CheckpointTensor& tensor : tensors) {
    const Place place = opened.places.at(tensor.name);
    const SafetensorsFile& file = opened.files[place.file];
    file.read(file.header().entries[place.entry], tensor.part);
  }
}

void CheckpointReader::read_once(const std::string& kind,
                                 const std::vector<CheckpointTensor>& tensors) const {
  together(ranks_, [&] {
    for (const CheckpointTensor& tensor : tensors) check_one(kind, tensor);
  });
  const std::vector<CheckpointTensor> needed = as_they_lie(tensors);
  const auto all = gather_contents({{{kind, needed}}, {}}, ContentGoes::kToRanks, ranks_);
  const PlacesByRank places = places_of(all, kind);
  const PlacesByRank reads = plan_reads(places);
  const std::set<std::string> shared = names_in(reads);
  const std::vector<CheckpointTensor> own =
      parts_at(reads[static_cast<size_t>(ranks_.where().rank)], needed);
  together(ranks_, [&] {
    read_own(kind, own);
    read_own(kind, tensors_named(tensors, shared, /*is_in=*/false));
  });
  const RedistributePlan plan = plan_redistribute(
      {.held = reads, .needed = only(places, shared), .hosts = hosts_of(all)}, ranks_.where());
  PartExchange(plan, own, tensors_named(needed, shared, /*is_in=*/true), ranks_).run();
}

std::string CheckpointReader::place() const { return "in '" + folder_ + "'"; }

}  // namespace trireme
