#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

namespace shm {
class Segment;
}

// [Note: outputs of frozen layers, kept in the memory of a host]
//
// What frozen layers return for a sample is the same in each epoch, so that it may be kept. All
// ranks of a host share one run of memory, since a sample comes to another rank in each epoch:
//
//   head | a record for each entry | a row for each entry
//
// Ids below the number of entries are kept, and the others never: an epoch visits each sample once,
// so that dropping the oldest entry for a new one would drop each before its use.
//
// A record says what its row is: the hash of the input row, how many layers it went through, and
// the hash of these layers. Whoever does not find just that computes the row. Records are written
// and read without a lock. A record's sequence number is odd while a rank writes, so that no other
// one begins, and a reader looks at it once more when it has copied the row. A rank that is killed
// there leaves an odd number: the entry is a miss from then on.

// The sample of a row, and the hash of the row that the layers are given.
struct CacheRow {
  int64_t id = 0;
  uint64_t input = 0;
};

// What a row of outputs looks like.
struct CacheForm {
  std::vector<int64_t> sizes = {};  // without the dimension of the batch
  at::ScalarType dtype = at::kFloat;
  size_t bytes() const;
  bool operator==(const CacheForm&) const = default;
};

// What a rank has had of a cache since it was made.
struct CacheStats {
  int64_t hits = 0;    // rows that were there
  int64_t misses = 0;  // rows that were computed, or advanced from fewer layers
  int64_t bytes = 0;   // what this rank has stored
  int64_t depth = 0;   // layers that rows have gone through, at most
};

// Rows of activations by sample, for all ranks of a host. Any thread may use it.
class TRIREME_API ActivationCache {
 public:
  // Makes the memory: `bytes` for all ranks of each host together, for samples 0 to samples - 1.
  // Collective over `communicator`; null for this process alone. Throws ValueError for numbers
  // below 1, for ranks that were given different ones, for a group whose ranks share no memory, and
  // where there is not so much memory.
  ActivationCache(int64_t samples, int64_t bytes, std::shared_ptr<Communicator> communicator);
  ~ActivationCache();
  ActivationCache(const ActivationCache&) = delete;
  ActivationCache& operator=(const ActivationCache&) = delete;

  int64_t samples() const { return samples_; }
  RankOf where() const { return where_; }
  // Returns what all rows look like; nothing before the first one came.
  std::optional<CacheForm> form() const;
  // Says how all rows look from now on. The first one that a rank of the host has said counts; if
  // it is this one, form() is known from here on. Throws ValueError where there is no room for one
  // row.
  void set_form(const CacheForm& form);
  // Returns how many samples have an entry; 0 before the form is known.
  int64_t entries() const;

  // Copies the row of a sample. Returns through how many layers it went; 0 where there is none that
  // is good for `layers`, the hashes of the first, the first two, ... layers; kOtherInput where
  // another input has been stored under this id.
  static constexpr int64_t kOtherInput = -1;
  int64_t read(CacheRow row, const std::vector<uint64_t>& layers, std::byte* into) const;

  // A row that is being written. It is a miss until end().
  class TRIREME_API Store {
   public:
    std::byte* data() const { return data_; }
    void end();

   private:
    friend class ActivationCache;
    Store(std::atomic<uint64_t>& sequence, uint64_t odd, std::byte* data)
        : sequence_(sequence), odd_(odd), data_(data) {}
    std::atomic<uint64_t>& sequence_;
    uint64_t odd_;
    std::byte* data_;
  };
  // Begins to write the row of a sample, as the output of all of `layers`. Returns nothing where
  // the sample has no entry, where it is there already, and where another rank is about to write.
  // Sets `is_other_input` where another input has been stored under this id.
  std::optional<Store> begin_store(CacheRow row, const std::vector<uint64_t>& layers,
                                   bool& is_other_input);

  // Adds to what stats() returns: of `depth` the highest counts.
  void count(const CacheStats& more);
  CacheStats stats() const;

  // Ends the use of it on all ranks of the host: nothing is read or stored any more.
  void turn_off();
  bool is_off() const;

 private:
  struct Head;
  struct Record;
  Head& head() const;
  Record& record(int64_t id) const;
  std::byte* row(int64_t id) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  int64_t samples_;
  int64_t bytes_;
  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  std::shared_ptr<const shm::Segment> segment_;  // null for one process
  at::Tensor own_;                               // its memory then
  std::byte* data_ = nullptr;
  mutable std::mutex counting_;
  CacheStats stats_;
};

}  // namespace trireme
