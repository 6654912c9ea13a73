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
// The owner of an object counts, by rank, the Refs to it. A rank that sends a Ref to another one
// first tells the owner, on its own lane: "rank 2 has one more". So the owner learns of the
// receiver's Ref before the sender can drop its own, whatever the receiver does meanwhile; a
// message of the receiver in between may make its count negative for a moment, while the sender's
// is not zero. An object is gone when all counts are zero. The counts of a rank that has died are
// dropped, and so are later messages about it.

// The objects of this rank that others call. Thread-safe.
class TRIREME_API RefTable {
 public:
  // Returns the number of the object, and counts one Ref of `holder`. An object that is in the
  // table already (Hosted::identity) keeps its number.
  int64_t add(std::shared_ptr<Hosted> object, const std::string& class_name, int64_t holder);
  struct Found {
    std::shared_ptr<Hosted> object = nullptr;
    std::string class_name = {};
  };
  // Returns nothing for an object that is gone.
  Found find(int64_t number) const;
  // Changes the count of a rank; ignores an object that is gone. Returns false for a number that
  // was never given.
  bool count(int64_t number, int64_t holder, int64_t change);
  // Counts one more Ref; returns false if the object is gone.
  bool hold(int64_t number, int64_t holder);
  void forget(int64_t holder);
  // Removes and returns objects that are gone; destroying them may run user code.
  std::vector<std::shared_ptr<Hosted>> take_gone();
  bool has_gone() const;
  // Returns the class names of the objects, for messages.
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
