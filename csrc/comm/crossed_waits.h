#pragma once

#include <trireme/comm/group_health.h>
#include <trireme/comm/progress.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: crossed waits]
//
// Two ranks wait crosswise if each is in an operation to which the other one has not come: one
// gathers a unit, say, and the other one reduces gradients by another group. Neither will ever go
// on. So a rank whose wait takes long writes to the Store, again and again, in which operation of
// which group it waits, and how many it has started in each; and it reads there what others wrote.
// The words of another rank count only if it wrote them twice while this one waited as well: then
// both have waited at one time, and what they have started cannot change any more.
//
// A step that goes well never gets here.

// Watches the waits of this rank in several groups of the same ranks.
class TRIREME_API CrossedWaits {
 public:
  // Ranks exchange messages at `meeting_place`, whose ranks are compared.
  explicit CrossedWaits(std::shared_ptr<GroupHealth> meeting_place);
  // Watches one more sequence of operations, each only once. Called alike on all ranks.
  void add(std::shared_ptr<const Progress> progress);

  // Returns the rank with which this one waits crosswise, and what both wait for, if there is one.
  // Called from time to time while a wait takes long. Never throws.
  std::optional<std::string> look();

 private:
  struct Said {
    int64_t beat = 0;
    size_t place = 0;  // the progress in which it waits
    Progress::Stuck stuck;
    std::vector<int64_t> started;
    bool is_like(const Said& other) const {
      return place == other.place && stuck.number == other.stuck.number && started == other.started;
    }
    std::string text() const;
    static std::optional<Said> read(const std::string& text);
  };
  std::string key(int64_t rank) const;
  std::optional<Said> own_words();

  std::mutex mutex_;
  std::shared_ptr<GroupHealth> board_;
  int64_t number_ = 0;  // this object's, among all of the group
  int64_t beat_ = 0;
  int64_t looks_ = 0;
  std::vector<std::shared_ptr<const Progress>> progress_;
  std::optional<Said> said_;               // this rank's words
  std::vector<std::optional<Said>> read_;  // what the others have said since
};

}  // namespace trireme
