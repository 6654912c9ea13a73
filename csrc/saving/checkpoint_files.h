#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/chunk_plan.h>
#include <trireme/saving/safetensors_file.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace trireme {

// [Note: a checkpoint is a folder whose index names every file in it]
//
//   model.safetensors.index.json         which tensor is in which file; as Hugging Face has it
//   model-00001-of-00002.safetensors     whole tensors, under the names of the plain model
//   optimizer.safetensors.index.json     the same for "<parameter>.exp_avg" and the like
//   optimizer-00001-of-00001.safetensors
//   optimizer.json                       groups, and what no tensor holds
//   compression.safetensors.index.json   "residual:<parameter>" and the like, by sender
//   compression-00001-of-00001.safetensors
//   rounds.safetensors.index.json        what each worker has between two averages
//   rounds-00001-of-00001.safetensors    (held_rounds.h)
//   random.safetensors.index.json        states of random generators, by rank (checkpoints.h)
//   random-00001-of-00001.safetensors
//   frozen.safetensors.index.json        of a PipeTransformer: "layers", int64, has how many there
//   frozen-00001-of-00001.safetensors    are, how many are frozen, then the history
//   extra.json                           what the user gave
//
// The model's index also has the length of every other file of the folder, so a missing or
// truncated file is detected before anything is loaded. Every file of tensors names itself and the
// save that it belongs to, so a file of another checkpoint is detected, too.
//
// Every byte of the folder has a checksum. An index has those of its files of tensors, chunk by
// chunk (chunk_plan.h), the model's also one of every other JSON file; and each index ends with one
// of its own text without that member. Folders that were saved without checksums are loaded as they
// are. Files of other programs have none of this, also a single "model.safetensors" without an
// index.

// All kinds of tensors.
constexpr const char* kModelTensors = "model";
constexpr const char* kOptimizerTensors = "optimizer";
constexpr const char* kCompressionTensors = "compression";  // what codes of gradients left out
constexpr const char* kRandomTensors = "random";            // states of random generators, by rank
constexpr const char* kFrozenTensors = "frozen";            // how far freezing has come
constexpr const char* kTableTensors = "tables";  // a parameter server's state beside the values
// All texts.
constexpr const char* kOptimizerText = "optimizer.json";
constexpr const char* kExtraText = "extra.json";

// The files of one kind of tensors ("model").
struct CheckpointFiles {
  std::string kind;
  std::string save;                                // the save they belong to
  std::map<std::string, SafetensorsHeader> files;  // key: file name
};

// Spreads tensors, in their order, over files of at most `max_file_bytes`; a larger tensor gets one
// of its own. All ranks plan the same files.
TRIREME_API CheckpointFiles plan_checkpoint_files(const std::string& kind, const std::string& save,
                                                  std::vector<SafetensorsEntry> tensors,
                                                  int64_t max_file_bytes);

// All that one save writes. `kinds` has a "model".
struct SavingPlan {
  std::map<std::string, CheckpointFiles> kinds;
  std::map<std::string, std::string> texts;  // key: file name
};

// Returns the JSON texts of the indexes, by file name. The model's index names all files, and
// `replaces`, the save that this one replaces; empty: none. `checksums` are those of all files of
// tensors; empty: not known yet.
TRIREME_API std::map<std::string, std::string> index_texts(const SavingPlan& plan,
                                                           const std::string& replaces,
                                                           const ChunkChecksums& checksums);

// The content of an index. Its file names are all in the index's folder.
struct CheckpointIndex {
  std::string save;                               // empty: written by another program
  std::map<std::string, std::string> weight_map;  // file by tensor
  std::map<std::string, int64_t> file_bytes;      // key: file; empty: written by another program
  int64_t chunk_bytes = 0;                        // 0: saved without checksums
  ChunkChecksums checksums;                       // of its files of tensors
  // Only the model's index has the members below.
  bool names_all = false;
  std::map<std::string, int64_t> other_bytes;       // key: every other file of the folder
  std::map<std::string, uint64_t> other_checksums;  // those of JSON files
  std::string replaces;                             // the save that was there before; empty: none
};
// Whether bytes are compared with their checksums, where there are any.
enum class Verify : uint8_t { kNo, kYes };

// Throws ValueError for a file that is no index, or one that names files outside of its folder, or
// whose text is not the one that was saved.
TRIREME_API CheckpointIndex read_index(const std::string& path, RankOf where,
                                       Verify verify = Verify::kYes);

TRIREME_API std::string index_name(const std::string& kind);

// Returns the names of all files of a checkpoint, from its model's index.
TRIREME_API std::set<std::string> file_names(const CheckpointIndex& index);

// Returns the text of a small file, a JSON object. Throws ValueError if the file does not exist or
// is no JSON object; see check_json().
TRIREME_API std::string read_json_file(const std::string& path, RankOf where);

}  // namespace trireme
