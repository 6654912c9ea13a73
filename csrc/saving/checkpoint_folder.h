#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_files.h>

#include <map>
#include <optional>
#include <set>
#include <string>

namespace trireme {

// [Note: only what we wrote ourselves is deleted]
//
// A save writes into "<path>.saving", which takes the place of "<path>" in one step when all of it
// is on the disk; so <path> is always a whole checkpoint, the previous one or this one. Where the
// file system cannot exchange folders (NFS), the previous one is "<path>.replaced" in between, and
// is what is loaded then. Nothing else beside <path> is touched.
//
// Files are deleted one by one, by names that we know:
//
//   <path>            those that its model's index names; nothing else may be there
//   <path>.saving     those that "model.safetensors.index.json.saving" names. It is the index in
//                     the making, is on the disk before any other file is there, and goes when the
//                     folder is in its place; so a folder that has it was left by an interrupted
//                     save. Or else those of the checkpoint that was just replaced: that index
//                     names the save whose place it took ("replaces").
//   <path>.replaced   those of the checkpoint that was just replaced, or is just being so.
//
// A copy that somebody made by hand is neither in the making nor what was replaced, so it is
// refused in these places before a byte is written. An index is deleted behind all that it names.
// Entries that begin with ".nfs" are NFS's: files that were deleted while somebody reads them.

// Says where a checkpoint is loaded from.
struct CheckpointPlace {
  std::string folder;
  std::string file;  // in it; empty: the folder has an index, or a "model.safetensors" alone
};
// Finds `path`, a folder or one file of tensors, or what an interrupted save has left of the
// previous checkpoint there. Throws ValueError if nothing is there.
TRIREME_API CheckpointPlace find_checkpoint(const std::string& path, RankOf where);

// Is the folder in the making: one rank begins, commits or abandons it. All throw ValueError or
// c10::Error.
class TRIREME_API CheckpointFolder {
 public:
  // Symbolic links are followed, also to what is not there yet. Throws ValueError for an empty
  // path. `can_exchange`: false does what is done where the file system cannot.
  CheckpointFolder(const std::string& path, RankOf where, bool can_exchange = true);

  // Returns where files are while they are written.
  const std::string& staging() const { return staging_; }
  // Returns where the previous checkpoint is, if a save was interrupted after it had moved that
  // away; empty otherwise.
  std::string moved_away() const;

  // Makes the files of tensors. Removes what an interrupted save has left before. Refuses what none
  // has left, a path where something else is than a checkpoint, and the folder that this process
  // works in, which would be deleted under it. What it throws leaves nothing behind.
  void begin(const SavingPlan& plan);
  // Makes the folder the checkpoint.
  void commit(const SavingPlan& plan);
  void abandon() const noexcept;

 private:
  using Names = std::set<std::string>;  // files that are ours; empty: none are
  std::optional<CheckpointIndex> index_at(const std::string& path) const;
  bool is_replaced(const CheckpointIndex& index) const;
  Names names_in(const std::string& folder) const;
  void check(const std::string& folder, const std::string& expected) const;
  void check_path() const;
  void clear() const;
  void make(const SavingPlan& plan);
  void remove(const std::string& folder) const;
  void take_place() const;
  void write_text(const std::string& name, const std::string& text) const;
  void sync_folder(const std::string& folder) const;
  [[noreturn]] void fail(const std::string& doing, int error) const;

  std::string path_;
  std::string staging_;
  std::string replaced_;
  RankOf where_;
  bool can_exchange_;
  std::map<std::string, std::string> indexes_ = {};  // texts by file name
};

}  // namespace trireme
