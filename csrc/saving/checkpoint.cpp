#include <trireme/saving/checkpoint.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/run_together.h>
#include <trireme/memory/snapshot.h>
#include <trireme/saving/checksum.h>
#include <trireme/saving/chunk_hasher.h>
#include <trireme/saving/chunk_plan.h>
#include <trireme/saving/content_text.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

// The content that all ranks together save.
struct Agreed {
  std::string save;
  std::map<std::string, std::vector<SafetensorsEntry>> tensors;  // by kind
  std::map<std::string, WrittenParts> parts;                     // who writes what, by kind
  std::map<std::string, std::string> texts;
};

// Merges the tensors of one kind from the descriptions of all ranks.
class Merge {
 public:
  explicit Merge(RankOf where) : where_(where) {}

  void add(const std::vector<TensorPlace>& places, size_t rank) {
    for (const TensorPlace& place : places) {
      const SafetensorsEntry entry{place.name, place.dtype, place.sizes, 0};
      const auto [known, is_first] = known_.try_emplace(entry.name, entries_.size(), rank);
      if (is_first) entries_.push_back(entry);
      const SafetensorsEntry& first = entries_[known->second.index];
      if (!(first == entry))
        refuse("'" + entry.name + "' as " + describe(entry.dtype, entry.sizes) + " on rank " +
               std::to_string(rank) + " and as " + describe(first.dtype, first.sizes) +
               " on rank " + std::to_string(known->second.rank));
      if (place.box) add_part(known->second, *place.box, entry, rank);
    }
  }

  // Returns who writes what.
  const WrittenParts& parts() const { return parts_; }

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
    Known(size_t place, size_t first_rank) : index(place), rank(first_rank) {}
    size_t index;
    size_t rank;
    int64_t numel = 0;
    std::set<TensorBox> parts = {};
  };

  void add_part(Known& known, const TensorBox& part, const SafetensorsEntry& entry, size_t rank) {
    if (!known.parts.insert(part).second) return;  // a lower rank has the same
    known.numel += part.numel();
    parts_[entry.name].push_back({static_cast<int64_t>(rank), part});
  }

  void refuse(const std::string& got) const {
    TORCH_CHECK_VALUE(
        false, error_text("saving", "got " + got, where_, "Save the same model on all ranks."));
  }

  RankOf where_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, Known> known_;
  WrittenParts parts_;
};

Agreed agree(const CheckpointContent& content, const CheckpointRanks& ranks) {
  const std::vector<ContentOfRank> all = gather_contents(content, ContentGoes::kToFiles, ranks);
  Agreed agreed;
  agreed.save = all.front().save;
  std::map<std::string, Merge> merged;
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [kind, places] : all[rank].tensors)
      merged.try_emplace(kind, ranks.where()).first->second.add(places, rank);
  for (auto& [kind, tensors] : merged) {
    agreed.tensors[kind] = tensors.finish();
    agreed.parts[kind] = tensors.parts();
  }
  agreed.texts = merge_texts(all, ranks.where());
  return agreed;
}

// A tensor of which this rank writes a part, and its place in the content.
struct TensorToWrite {
  const CheckpointTensor* tensor;
  size_t index;
};
using TensorsByName = std::map<std::string, TensorToWrite>;

// Which rank hashes what, by file.
using ChunkPlans = std::map<std::string, ChunkPlan>;
// Checksums of some chunks, by file and chunk.
using SomeChecksums = std::map<std::string, std::map<size_t, uint64_t>>;

// Returns the tensors of which this rank writes a part. `first`: the place of the first one in the
// content.
TensorsByName tensors_to_write(const std::vector<CheckpointTensor>& tensors, size_t first,
                               const WrittenParts& parts, RankOf where) {
  TensorsByName own;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto found = parts.find(tensors[i].name);
    if (found == parts.end()) continue;
    if (std::any_of(found->second.begin(), found->second.end(),
                    [&](const WrittenPart& part) { return part.rank == where.rank; }))
      own[tensors[i].name] = {&tensors[i], first + i};
  }
  return own;
}

ChunkPlans plan_hashing(const SavingPlan& plan, const std::map<std::string, WrittenParts>& parts,
                        RankOf where) {
  ChunkPlans plans;
  for (const auto& [kind, files] : plan.kinds) {
    const auto found = parts.find(kind);
    for (const auto& [name, header] : files.files)
      plans[name] =
          plan_chunks(header, found == parts.end() ? WrittenParts() : found->second, where.world);
  }
  return plans;
}

// Writes this rank's parts of one save.
class PartWriting {
 public:
  PartWriting(const SaveCheckpointRequest& request, const ChunkPlans& plans, std::string folder,
              RankOf where)
      : request_(request), plans_(plans), folder_(std::move(folder)), where_(where) {}

  // Writes the parts of one kind.
  void write(const CheckpointFiles& files, const TensorsByName& by_name) {
    for (const auto& [name, header] : files.files) {
      auto file = SafetensorsFile::open_to_write(folder_ + "/" + name, header, where_);
      ChunkHasher hasher(plans_.at(name), where_.rank, header.file_bytes);
      hasher.add(0, header_bytes(header));
      bool has_written = false;
      for (const SafetensorsEntry& entry : header.entries) {
        const auto found = by_name.find(entry.name);
        if (found == by_name.end()) continue;
        write(file, entry, found->second, hasher);
        has_written = true;
      }
      if (has_written || where_.rank == 0) written_.push_back(std::move(file));
      checksums_[name] = hasher.found();
    }
  }

  // Brings all to the disk. Writers of the tensors need not wait for that.
  void sync() {
    if (request_.snapshot != nullptr) request_.snapshot->close();
    for (const SafetensorsFile& file : written_) file.sync();
    written_.clear();
  }

  // Returns the checksums that were found on the way.
  SomeChecksums& checksums() { return checksums_; }
  int64_t bytes() const { return bytes_; }

 private:
  void write(const SafetensorsFile& file, const SafetensorsEntry& entry, const TensorToWrite& given,
             ChunkHasher& hasher) {
    const TensorPart& part = given.tensor->part;
    bytes_ += static_cast<int64_t>(part.values.nbytes());
    if (request_.snapshot == nullptr) return file.write(entry, part, &hasher);
    const bool is_whole =
        request_.snapshot->read(given.index, [&](int64_t begin, std::string_view bytes) {
          expect_not_given_up();
          file.write_some(entry, part, begin, bytes, &hasher);
        });
    TORCH_CHECK(is_whole, error_text("saving",
                                     "'" + entry.name +
                                         "' was written while it was being saved, and not by a "
                                         "step, a load or writing(): the values of the moment of "
                                         "the call are lost",
                                     where_, "Wait for the save before such writes."));
  }

  void expect_not_given_up() const {
    TORCH_CHECK(request_.is_given_up == nullptr || !*request_.is_given_up,
                error_text("saving", "the save to '" + request_.path + "' was given up", where_,
                           "The checkpoint before it is still there."));
  }

  const SaveCheckpointRequest& request_;
  const ChunkPlans& plans_;
  std::string folder_;
  RankOf where_;
  SomeChecksums checksums_;
  std::vector<SafetensorsFile> written_ = {};
  int64_t bytes_ = 0;
};

bool has_shared(const ChunkPlans& plans) {
  for (const auto& [name, plan] : plans)
    for (const ChunkPlan::Chunk& chunk : plan.chunks)
      if (chunk.is_shared) return true;
  return false;
}

// Adds the checksums of this rank's chunks that it has not found while it wrote.
void hash_files(const SavingPlan& plan, const ChunkPlans& plans, const std::string& folder,
                RankOf where, SomeChecksums& checksums) {
  for (const auto& [kind, files] : plan.kinds) {
    for (const auto& [name, header] : files.files) {
      std::optional<SafetensorsFile> file;
      const std::vector<ChunkPlan::Chunk>& chunks = plans.at(name).chunks;
      for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
        if (chunks[chunk].rank != where.rank || !chunks[chunk].is_shared) continue;
        if (!file) file = SafetensorsFile::open_to_write(folder + "/" + name, header, where);
        const int64_t begin = static_cast<int64_t>(chunk) * kChunkBytes;
        checksums[name][chunk] =
            file->checksum(begin, std::min(begin + kChunkBytes, header.file_bytes));
      }
    }
  }
}

// Returns the checksums of all chunks. Collective.
ChunkChecksums gather_checksums(const SomeChecksums& own, const ChunkPlans& plans,
                                const CheckpointRanks& ranks) {
  ChunkChecksums all;
  for (const auto& [name, plan] : plans) all[name].resize(plan.chunks.size());
  size_t missing = 0;
  for (const auto& [name, checksums] : all) missing += checksums.size();
  for (const std::string& text : gather_texts(nlohmann::json(own).dump(), ranks)) {
    const auto theirs = nlohmann::json::parse(text).get<SomeChecksums>();
    for (const auto& [name, checksums] : theirs) {
      for (const auto& [chunk, checksum] : checksums) all.at(name).at(chunk) = checksum;
      missing -= checksums.size();
    }
  }
  TORCH_INTERNAL_ASSERT(missing == 0);
  return all;
}

}  // namespace

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) {
  return std::string(c10::toString(dtype)) + " of sizes " + c10::str(sizes);
}

std::vector<std::string> gather_texts(const std::string& own, const CheckpointRanks& ranks) {
  if (!ranks.communicator) return {own};
  return gather_texts(own, *ranks.communicator, ranks.device);
}

bool some_rank_has_optimizer(bool has, bool trains, const CheckpointRanks& ranks) {
  constexpr const char *kHas = "an optimizer", *kLacks = "none";
  const std::vector<std::string> said = gather_texts(has ? kHas : trains ? kLacks : "", ranks);
  const auto rank_with = [&](const char* text) {
    return std::find(said.begin(), said.end(), text) - said.begin();
  };
  const auto world = static_cast<std::ptrdiff_t>(said.size());
  const auto with = rank_with(kHas), without = rank_with(kLacks);
  if (with == world) return false;
  TORCH_CHECK_VALUE(
      without == world,
      error_text("saving",
                 c10::str("got an optimizer on rank ", with, ", and none on rank ", without,
                          ", which has parameters to train"),
                 ranks.where(), "Pass each rank's optimizer, or leave it out on all ranks."));
  return true;
}

void together(const CheckpointRanks& ranks, const std::function<void()>& work) {
  if (!ranks.communicator) return work();
  const auto failed = run_together(work, *ranks.communicator, ranks.device);
  if (!failed) return;
  if (failed->own) std::rethrow_exception(failed->own);
  const std::string text = error_text(
      "saving", "rank " + std::to_string(failed->rank) + " could not go on: " + failed->text,
      ranks.where(), "Mend what it says, and call this again on all ranks.");
  TORCH_CHECK_VALUE(!failed->is_value_error, text);
  TORCH_CHECK(false, text);
}

int64_t save_checkpoint(const SaveCheckpointRequest& request, const CheckpointRanks& ranks) {
  const RankOf where = ranks.where();
  Agreed agreed = agree(request.content, ranks);
  SavingPlan plan;
  plan.texts = std::move(agreed.texts);
  agreed.tensors.try_emplace(kModelTensors);  // its index always exists
  for (auto& [kind, tensors] : agreed.tensors)
    plan.kinds[kind] =
        plan_checkpoint_files(kind, agreed.save, std::move(tensors), request.max_file_bytes);

  const ChunkPlans chunks = plan_hashing(plan, agreed.parts, where);
  std::unique_ptr<CheckpointFolder> folder;
  std::optional<PartWriting> writing;
  const bool is_first = where.rank == 0;
  bool has_begun = false;
  try {
    together(ranks, [&] {
      folder = std::make_unique<CheckpointFolder>(request.path, where);
      if (is_first) folder->begin(plan);
      has_begun = is_first;
      writing.emplace(request, chunks, folder->staging(), where);
    });
    together(ranks, [&] {
      size_t first = 0;
      for (const auto& [kind, tensors] : request.content.tensors) {
        const WrittenParts& parts = agreed.parts.at(kind);
        writing->write(plan.kinds.at(kind), tensors_to_write(tensors, first, parts, where));
        first += tensors.size();
      }
      writing->sync();
    });
    SomeChecksums& own = writing->checksums();
    if (has_shared(chunks))
      together(ranks, [&] { hash_files(plan, chunks, folder->staging(), where, own); });
    const ChunkChecksums checksums = gather_checksums(own, chunks, ranks);
    together(ranks, [&] {
      if (is_first) folder->commit(plan, checksums);
    });
  } catch (...) {
    if (has_begun) folder->abandon();
    throw;
  }
  return writing->bytes();
}

}  // namespace trireme
