#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/safetensors_file.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// [Note: a checkpoint is a folder]
//
//   model.safetensors.index.json         which tensor is in which file; as Hugging Face has it
//   model-00001-of-00002.safetensors     whole tensors, under the names of the plain model
//   optimizer.safetensors.index.json     the same for "<parameter>.exp_avg" and the like
//   optimizer-00001-of-00001.safetensors
//   optimizer.json                       groups, and what no tensor holds
//   extra.json                           what the user gave
//
// It is written as "<path>.saving" and takes the place of "<path>" in one step when all of it is on
// the disk, so that <path> is always a whole checkpoint, the previous one or this one. Where the
// file system cannot exchange folders (NFS), the previous one is "<path>.previous" in between, and
// is what is loaded then.
//
// Every file names the save that it belongs to and itself, and the index the length of every file;
// so a file that is missing, cut, or of another checkpoint is found before anything is loaded. The
// tensors' bytes have no checksum: what the disk has turned over within a file is not found.

// The files of one kind of tensors ("model").
struct CheckpointFiles {
  std::string kind;
  std::string save;                                // which save they belong to
  std::map<std::string, SafetensorsHeader> files;  // by file name
};

// Spreads tensors, in their order, over files of at most `max_file_bytes`; a larger tensor gets one
// of its own. Files are planned by all ranks alike.
TRIREME_API CheckpointFiles plan_checkpoint_files(const std::string& kind, const std::string& save,
                                                  std::vector<SafetensorsEntry> tensors,
                                                  int64_t max_file_bytes);

// The JSON text of their index.
TRIREME_API std::string index_text(const CheckpointFiles& files);

// What an index says. Throws ValueError for what is none.
struct CheckpointIndex {
  std::string save;                               // empty: written by another program
  std::map<std::string, std::string> weight_map;  // file by tensor
  std::map<std::string, int64_t> file_bytes;      // by file; empty: written by another program
};
TRIREME_API CheckpointIndex read_index(const std::string& path, RankOf where);

TRIREME_API std::string index_name(const std::string& kind);

// The text of a small file; throws ValueError if there is none.
TRIREME_API std::string read_text(const std::string& path, RankOf where);

// Where `path` is loaded from: itself, or what an interrupted save has left of the previous
// checkpoint. Throws ValueError if neither is there.
TRIREME_API std::string find_checkpoint(const std::string& path, RankOf where);

// The folder in the making: one rank begins, commits or abandons it. All throw ValueError or
// c10::Error.
class TRIREME_API CheckpointFolder {
 public:
  CheckpointFolder(const std::string& path, RankOf where);

  // Where files are while they are written.
  const std::string& staging() const { return staging_; }

  // An empty folder. Refuses a path where something else is than a checkpoint: it would be gone.
  void begin() const;
  void create(const CheckpointFiles& files) const;
  // `texts`: by file name. Then the folder is the checkpoint.
  void commit(const std::map<std::string, std::string>& texts) const;
  void abandon() const noexcept;

 private:
  void check_replaceable(const std::string& folder) const;
  void write_text(const std::string& name, const std::string& text) const;
  void sync_folder(const std::string& folder) const;
  [[noreturn]] void fail(const std::string& doing, int error) const;

  std::string path_;
  std::string staging_;
  std::string previous_;
  RankOf where_;
};

}  // namespace trireme
