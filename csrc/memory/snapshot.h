#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace trireme {

// [Note: the values of one moment, read beside training]
//
// A snapshot has the values that tensors have when it is made, and copies none of them at first:
// its reader takes them from the memory of the tensors, block by block, since forward and backward
// only read it. Who is about to write (an optimizer's step, writing(), a load) says so before, and
// keep_snapshots_of() then copies the blocks that were not read yet, the last one first, while the
// reader goes on from the front. It returns where the two meet, so a writer waits no longer than
// either reading or copying all of it would take.
//
// A write that nobody has announced is found by the version counter of its tensor, which is
// compared whenever a block has been read or copied. Writes through `.data` are not found.

// The values of tensors at one moment. read() is for one thread, keep() for any.
class TRIREME_API Snapshot {
 public:
  // Takes contiguous tensors of the CPU; nobody may write one that has no version counter, an
  // inference tensor. `written` are the tensors whose announced writes are also writes of these,
  // such as the parameters of an optimizer that steps some of them.
  static std::shared_ptr<Snapshot> make(std::vector<at::Tensor> tensors,
                                        const std::vector<at::Tensor>& written);
  ~Snapshot() = default;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Calls visit(begin, bytes) for the blocks of a tensor in their order: `bytes` are those from
  // byte `begin` on. Returns false, and may leave blocks out, if an unannounced write came first.
  // What `visit` throws comes out of it.
  using Visit = c10::function_ref<void(int64_t begin, std::string_view bytes)>;
  bool read(size_t tensor, const Visit& visit);
  // Lets writers go on, and the tensors go: nothing is read any more.
  void close() noexcept;

  // Returns when the tensors may be written.
  void keep() noexcept;
  bool is_written_with(const at::Tensor& tensor) const {
    return written_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  // Returns how long writers have been held so far.
  int64_t stalled_ns() const { return stalled_ns_; }
  // Returns how many bytes writers have copied so far.
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  enum class State : uint8_t { kInPlace, kReading, kCopying, kCopied, kDone };
  struct Block {
    size_t tensor;
    int64_t begin, bytes;  // in its tensor
    State state = State::kInPlace;
    std::unique_ptr<char[]> copy = nullptr;
  };

  explicit Snapshot(std::vector<at::Tensor> tensors);
  const char* place_of(const Block& block) const;
  void compare_version(size_t tensor);
  void read_block(Block& block, const Visit& visit, std::unique_lock<std::mutex>& lock);
  void copy_block(Block& block, std::unique_lock<std::mutex>& lock);
  void finish(Block& block);

  std::vector<at::Tensor> tensors_;
  std::vector<int64_t> versions_;
  std::unordered_set<const at::TensorImpl*> written_;
  std::vector<size_t> first_block_;  // by tensor; one more at the end
  uint64_t born_;                    // forks_so_far() when this was made
  std::atomic<int64_t> stalled_ns_{0}, copied_bytes_{0};

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<Block> blocks_;
  std::vector<bool> is_overwritten_;  // by tensor
  bool is_closed_ = false;
};

// Announces that these tensors, or states of an optimizer that steps them, are about to be written:
// returns when no snapshot reads them in place. Costs a look at a number while there is none.
// Thread-safe.
TRIREME_API void keep_snapshots_of(const std::vector<at::Tensor>& tensors) noexcept;
// The same for whatever has a snapshot.
TRIREME_API void keep_all_snapshots() noexcept;
// Returns whether there is any snapshot.
TRIREME_API bool has_snapshots() noexcept;

}  // namespace trireme
