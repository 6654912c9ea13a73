#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace trireme {

// [Note: numbered checkpoints]
//
//   run/step-0000000100    an ordinary checkpoint (checkpoint_files.h)
//   run/step-0000000200
//
// A save is one of a checkpoint of its own path, so what is there is whole while nothing damages
// it. When a new one is durable, those that are older than the last `keep` are deleted: only files
// that a save of ours has written, of folders in which nothing else lies. One that was found
// damaged is never deleted; a save of its number moves it to "<name>.damaged".

// The checkpoints of one folder. There is one such object for a folder in a process.
class TRIREME_API CheckpointSeries {
 public:
  // Follows symbolic links; the folder need not exist yet. Throws ValueError for a path that is no
  // folder, or of which this rank has another series, and for keep < 1.
  CheckpointSeries(const std::string& folder, int64_t keep, RankOf where);
  ~CheckpointSeries();
  CheckpointSeries(const CheckpointSeries&) = delete;
  CheckpointSeries& operator=(const CheckpointSeries&) = delete;

  const std::string& folder() const { return folder_; }
  std::string path_of(int64_t step) const;
  // Returns the steps of all folders that have such a name, ascending.
  std::vector<int64_t> steps() const;

  // Remembers that a checkpoint has failed its checks.
  void note_damaged(int64_t step);
  // Moves a damaged checkpoint out of the way of a save of its number. Throws c10::Error if that
  // fails. On one rank, as the next one.
  void make_room(int64_t step);
  // Deletes the checkpoints that are not needed once this one is durable; those that cannot be
  // deleted stay, with a warning.
  void keep_last(int64_t step) noexcept;

 private:
  std::string folder_;
  int64_t keep_;
  RankOf where_;
  mutable std::mutex mutex_;
  std::set<int64_t> damaged_;
};

}  // namespace trireme
