#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/hosted.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace trireme::remote {

// [Note: who holds an object]
//
// The owner of an object counts, by rank, the Refs that there are. Who sends a Ref to another rank
// tells the owner first, on its own lane: "rank 2 has one more". So the word about the receiver's
// Ref is there before the sender can let go of its own, whatever the receiver does meanwhile; what
// the receiver says in between may make its count negative for a moment, while the sender's is not
// zero. An object is gone when all counts are zero. Those of a rank that has died are dropped, and
// so is what is said of it later.

// Holds the objects of this rank that others call. Thread-safe.
class TRIREME_API RefTable {
 public:
  // Returns the number of the object, and counts one Ref of `holder`. An object that is there
  // already (Hosted::identity) keeps its number.
  int64_t add(std::shared_ptr<Hosted> object, const std::string& class_name, int64_t holder);
  struct Found {
    std::shared_ptr<Hosted> object = nullptr;
    std::string class_name = {};
  };
  // Returns nothing for an object that is gone.
  Found find(int64_t number) const;
  // Counts Refs of a rank; nothing happens to an object that is gone. Returns false for one that
  // there never was.
  bool count(int64_t number, int64_t holder, int64_t change);
  // Counts one Ref more; returns false if the object is gone.
  bool hold(int64_t number, int64_t holder);
  void forget(int64_t holder);
  // Returns objects that are gone, for whoever lets go of them: that may run code of the user's.
  std::vector<std::shared_ptr<Hosted>> take_gone();
  bool has_gone() const;
  // Returns what there is, by class, for messages.
  std::vector<std::string> classes() const;
  std::vector<std::shared_ptr<Hosted>> take_all();

 private:
  struct Entry {
    Found found = {};
    std::map<int64_t, int64_t> counts = {};  // keyed by holder
  };
  void drop_if_unheld(std::map<int64_t, Entry>::iterator entry);

  mutable std::mutex mutex_;
  std::map<int64_t, Entry> all_;
  std::unordered_map<const void*, int64_t> by_identity_;
  std::set<int64_t> gone_holders_;
  std::vector<std::shared_ptr<Hosted>> gone_;
  int64_t next_ = 0;
};

}  // namespace trireme::remote
