#include <trireme/saving/checkpoint.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/run_together.h>
#include <trireme/saving/content_text.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

// The content that all ranks together save.
struct Agreed {
  std::string save;
  std::map<std::string, std::vector<SafetensorsEntry>> tensors;  // by kind
  std::map<std::string, std::set<std::string>> own;              // this rank's, by kind
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

  // Returns the names of the tensors that this rank writes.
  const std::set<std::string>& own() const { return own_; }

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
    if (rank == static_cast<size_t>(where_.rank)) own_.insert(entry.name);
  }

  void refuse(const std::string& got) const {
    TORCH_CHECK_VALUE(
        false, error_text("saving", "got " + got, where_, "Save the same model on all ranks."));
  }

  RankOf where_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, Known> known_;
  std::set<std::string> own_;
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
    agreed.own[kind] = tensors.own();
  }
  agreed.texts = merge_texts(all, ranks.where());
  return agreed;
}

using TensorsByName = std::map<std::string, const CheckpointTensor*>;

void write_parts(const CheckpointFiles& files, const TensorsByName& by_name,
                 const std::string& folder, RankOf where) {
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

void save_checkpoint(const SaveCheckpointRequest& request, const CheckpointRanks& ranks) {
  const RankOf where = ranks.where();
  Agreed agreed = agree(request.content, ranks);
  SavingPlan plan;
  plan.texts = std::move(agreed.texts);
  agreed.tensors.try_emplace(kModelTensors);  // its index always exists
  for (auto& [kind, tensors] : agreed.tensors)
    plan.kinds[kind] =
        plan_checkpoint_files(kind, agreed.save, std::move(tensors), request.max_file_bytes);

  std::unique_ptr<CheckpointFolder> folder;
  const bool is_first = where.rank == 0;
  bool has_begun = false;
  try {
    together(ranks, [&] {
      folder = std::make_unique<CheckpointFolder>(request.path, where);
      if (is_first) folder->begin(plan);
      has_begun = is_first;
    });
    together(ranks, [&] {
      for (const auto& [kind, tensors] : request.content.tensors) {
        TensorsByName own;
        for (const CheckpointTensor& tensor : tensors)
          if (agreed.own.at(kind).count(tensor.name) > 0) own[tensor.name] = &tensor;
        write_parts(plan.kinds.at(kind), own, folder->staging(), where);
      }
    });
    together(ranks, [&] {
      if (is_first) folder->commit(plan);
    });
  } catch (...) {
    if (has_begun) folder->abandon();
    throw;
  }
}

}  // namespace trireme
