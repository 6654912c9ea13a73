#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_files.h>
#include <trireme/saving/folder_lock.h>

#include <map>
#include <optional>
#include <set>
#include <string>

namespace trireme {

// [Note: only what we wrote ourselves is deleted]
//
// A save writes into "<path>.saving", which takes the place of "<path>" in one step once all of it
// is on the disk; so <path> is always a whole checkpoint, the previous one or this one. If the file
// system cannot exchange folders (NFS), the previous checkpoint is at "<path>.replaced" in between
// and is loaded from there. Nothing else beside <path> is touched.
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
// A copy that a user made by hand is neither being made nor was it replaced, so at these paths it
// is refused before a byte is written. An index is deleted after all files that it names. Entries
// that begin with ".nfs" are NFS's: deleted files that a process still reads.
//
// What a save that is still going on has written looks like what an interrupted one has left. So a
// save makes <path>.saving if it is not there, locks it and then <path>, both until it ends, before
// it looks at what they hold. One that finds a lock, or what it has locked moved away, is refused.

// The place that a checkpoint is loaded from.
struct CheckpointPlace {
  std::string folder;
  std::string file;  // in `folder`; empty: the folder has an index, or a "model.safetensors" alone
};
// Returns the place for `path`, a folder or one file of tensors; if an interrupted save has moved
// the checkpoint there away, where it is now. Throws ValueError if there is none.
TRIREME_API CheckpointPlace find_checkpoint(const std::string& path, RankOf where);

// The folder of a checkpoint being saved: one rank begins, commits or abandons it. All methods but
// abandon() throw ValueError or c10::Error.
class TRIREME_API CheckpointFolder {
 public:
  // Follows symbolic links, also to paths that do not exist yet. Throws ValueError for an empty
  // path. `can_exchange`: false acts as on a file system that cannot exchange folders.
  CheckpointFolder(const std::string& path, RankOf where, bool can_exchange = true);

  // Returns the folder in which files are written.
  const std::string& staging() const { return staging_; }
  // Returns the folder of the previous checkpoint if a save was interrupted after moving it away;
  // empty otherwise.
  std::string moved_away() const;

  // Removes the remains of an interrupted save, then makes the files of tensors. Refuses other
  // files in their place, a path at which something other than a checkpoint lies or into which
  // another save is writing, and the working directory of this process, which would be deleted. On
  // an error nothing is left behind.
  void begin(const SavingPlan& plan);
  // Writes texts and indexes, and makes the folder the checkpoint. `checksums` are those of all
  // files of tensors.
  void commit(const SavingPlan& plan, const ChunkChecksums& checksums);
  void abandon() const noexcept;
  // Deletes the checkpoint, if all that lies there is one that a save has written.
  void remove_checkpoint() const;

 private:
  using Names = std::set<std::string>;  // files of ours; empty: none
  std::optional<CheckpointIndex> index_at(const std::string& path) const;
  bool is_replaced(const CheckpointIndex& index) const;
  Names names_in(const std::string& folder) const;
  void check(const std::string& folder, const std::string& expected) const;
  void check_path() const;
  void lock_and_clear();
  void clear() const;
  bool make_staging() const;
  void leave_staging(bool is_made) const noexcept;
  void make(const SavingPlan& plan);
  void remove_files(const std::string& folder) const;
  void remove(const std::string& folder) const;
  void take_place() const;
  void write_text(const std::string& name, const std::string& text) const;
  void sync_folder(const std::string& folder) const;
  [[noreturn]] void fail(const std::string& doing, int error, const std::string& more = {}) const;

  std::string path_;
  std::string staging_;
  std::string replaced_;
  RankOf where_;
  bool can_exchange_;
  std::string previous_ = {};  // the save that this one replaces; empty: none
  FolderLock path_lock_ = {};
  FolderLock staging_lock_ = {};
};

}  // namespace trireme
