#include <trireme/saving/checkpoint.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/run_together.h>
#include <trireme/saving/json_text.h>
#include <trireme/saving/optimizer_text.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>

// See [Note: saving and loading without gathering] in checkpoint.h.

namespace trireme {
namespace {

using Json = nlohmann::json;

std::string random_name() {
  std::random_device source;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

// Returns the place of a part: its first indices, then its sizes; null for an empty part.
Json place_of(const CheckpointTensor& tensor) {
  const at::Tensor& values = tensor.part.values;
  if (!values.defined() || values.numel() == 0) return nullptr;
  std::vector<int64_t> place = tensor.part.first;
  place.resize(tensor.sizes.size());
  place.insert(place.end(), values.sizes().begin(), values.sizes().end());
  return place;
}

// Throws ValueError for a text that cannot be saved.
void check_text(const std::string& name, const std::string& text, RankOf where) {
  TORCH_CHECK_VALUE(
      name == kOptimizerText || name == kExtraText,
      error_text("saving", "got a text called '" + name + "'", where, "Keep it in `extra`."));
  try {
    if (name == kExtraText) return check_json(text);
    merge_json({text});
  } catch (const JsonTextError& error) {
    const std::string what = name == kExtraText ? "`extra`" : "'" + name + "'";
    TORCH_CHECK_VALUE(
        false,
        error_text("saving", "got " + what + " with " + error.what() + ", expected a JSON object",
                   where, "Keep other things in tensors."));
  }
}

// Returns the description of a rank's content that it sends to the others.
std::string content_text(const CheckpointContent& content, const CheckpointRanks& ranks) {
  const RankOf where = ranks.where();
  const auto refuse = [&](const std::string& got, const std::string& next_step) {
    TORCH_CHECK_VALUE(false, error_text("saving", "got " + got, where, next_step));
  };
  Json all;
  all["save"] = random_name();
  all["tensors"] = Json::object();
  all["texts"] = Json::object();
  for (const auto& [kind, tensors] : content.tensors) {
    Json& rows = all["tensors"][kind] = Json::array();
    std::set<std::string> names;
    for (const CheckpointTensor& tensor : tensors) {
      if (safetensors_dtype(tensor.dtype).empty())
        refuse("'" + tensor.name + "' as " + describe(tensor.dtype, tensor.sizes) +
                   ", for which safetensors has no name",
               "Keep it as real numbers, or in `extra`.");
      if (!names.insert(tensor.name).second)
        refuse("two tensors called '" + tensor.name + "'", "Give one of them another name.");
      rows.push_back({tensor.name, static_cast<int>(tensor.dtype), tensor.sizes, place_of(tensor)});
    }
  }
  for (const auto& [name, text] : content.texts) {
    if (name == kExtraText && where.rank != 0) continue;
    check_text(name, text, where);
    all["texts"][name] = text;
  }
  try {
    return all.dump();
  } catch (const Json::exception&) {  // Texts were checked, so it is a name.
    refuse("a tensor whose name is not UTF-8", "Give it a name of characters.");
  }
  return {};
}

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

  void add(const Json& rows, size_t rank) {
    for (const Json& row : rows) {
      SafetensorsEntry entry{row.at(0).get<std::string>(),
                             static_cast<at::ScalarType>(row.at(1).get<int>()),
                             row.at(2).get<std::vector<int64_t>>(), 0};
      const auto [known, is_first] = known_.try_emplace(entry.name, entries_.size(), rank);
      if (is_first) entries_.push_back(entry);
      const SafetensorsEntry& first = entries_[known->second.index];
      if (!(first == entry))
        refuse("'" + entry.name + "' as " + describe(entry.dtype, entry.sizes) + " on rank " +
               std::to_string(rank) + " and as " + describe(first.dtype, first.sizes) +
               " on rank " + std::to_string(known->second.rank));
      if (!row.at(3).is_null()) add_part(known->second, row.at(3), entry, rank);
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
    std::set<std::vector<int64_t>> places = {};
  };

  void add_part(Known& known, const Json& part, const SafetensorsEntry& entry, size_t rank) {
    const auto place = part.get<std::vector<int64_t>>();
    if (!known.places.insert(place).second) return;  // a lower rank has the same
    known.numel += c10::multiply_integers(at::IntArrayRef(place).slice(entry.sizes.size()));
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
  std::string own;
  together(ranks, [&] { own = content_text(content, ranks); });
  std::vector<Json> all;
  for (const std::string& text : gather_texts(own, ranks)) all.push_back(Json::parse(text));
  Agreed agreed;
  agreed.save = all.front().at("save").get<std::string>();
  std::map<std::string, Merge> merged;
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [kind, rows] : all[rank].at("tensors").items())
      merged.try_emplace(kind, ranks.where()).first->second.add(rows, rank);
  for (auto& [kind, tensors] : merged) {
    agreed.tensors[kind] = tensors.finish();
    agreed.own[kind] = tensors.own();
  }
  std::map<std::string, std::vector<TextOfRank>> texts;
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [name, text] : all[rank].at("texts").items())
      texts[name].push_back({static_cast<int64_t>(rank), text});
  for (const auto& [name, of_ranks] : texts)
    agreed.texts[name] =
        name == kExtraText ? of_ranks.front().text : merge_optimizer_texts(of_ranks, ranks.where());
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
                          ", whose stages have parameters to train"),
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
