#include <trireme/memory/buffer_pool.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <string>
#include <utility>

namespace trireme {

class BufferPool::Blocks {
 public:
  struct Block {
    at::DataPtr data;
    int64_t bytes = 0;
  };

  // Returns an idle block of which at most half would be unused, the smallest; else an empty one.
  Block find(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      const bool fits = block->bytes >= bytes && block->bytes / 2 <= bytes;
      if (fits && (best == idle_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == idle_.end()) return {};
    Block found = std::move(*best);
    idle_.erase(best);
    return found;
  }

  void drop_idle() {
    std::list<Block> dropped;  // after the lock
    const std::lock_guard lock(mutex_);
    dropped.swap(idle_);
  }

  void keep_idle(int64_t blocks) {
    std::list<Block> dropped;
    const std::lock_guard lock(mutex_);
    most_idle_ = blocks;
    while (static_cast<int64_t>(idle_.size()) > most_idle_)
      dropped.splice(dropped.end(), idle_, idle_.begin());
  }

  void note_taken(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    taken_ += bytes;
    most_taken_ = std::max(most_taken_, taken_);
  }

  void give_back(Block block, bool is_kept) {
    Block dropped;  // after the lock
    const std::lock_guard lock(mutex_);
    taken_ -= block.bytes;
    if (!is_kept) {
      dropped = std::move(block);
      return;
    }
    idle_.push_back(std::move(block));
    if (static_cast<int64_t>(idle_.size()) <= most_idle_) return;
    dropped = std::move(idle_.front());
    idle_.pop_front();
  }

  void set_source(Source source) {
    const std::lock_guard lock(mutex_);
    source_ = std::move(source);
  }
  Source source() const {
    const std::lock_guard lock(mutex_);
    return source_;
  }

  int64_t taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
  }
  int64_t most_taken() const {
    const std::lock_guard lock(mutex_);
    return most_taken_;
  }

 private:
  mutable std::mutex mutex_;
  Source source_;
  std::list<Block> idle_;  // the longest unused first
  int64_t most_idle_ = kIdle;
  int64_t taken_ = 0;
  int64_t most_taken_ = 0;
};

BufferPool::BufferPool(c10::Device device) : device_(device), blocks_(std::make_shared<Blocks>()) {}

BufferPool::~BufferPool() { blocks_->keep_idle(0); }

void BufferPool::keep_idle(int64_t blocks) { blocks_->keep_idle(blocks); }

void BufferPool::set_source(Source source) {
  blocks_->set_source(std::move(source));
  blocks_->drop_idle();
}

at::DataPtr BufferPool::take(int64_t bytes, const char* label) {
  struct Taken {
    std::shared_ptr<Blocks> blocks;
    Blocks::Block block;
    bool is_kept;
  };
  const bool is_kept = device_.is_cpu();
  Blocks::Block block;
  if (is_kept) block = blocks_->find(bytes);
  if (!block.data) {
    const c10::OptionalDeviceGuard guard(device_);
    try {
      const Source source = blocks_->source();
      block = {source ? source(bytes)
                      : c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes)),
               bytes};
    } catch (const c10::Error& error) {
      blocks_->drop_idle();
      C10_THROW_ERROR(
          OutOfMemoryError,
          error_text("buffer_pool",
                     "got no memory for " + std::to_string(bytes) + " bytes of " + label + " on " +
                         device_.str() + " beside " + std::to_string(taken_bytes()) +
                         " that are taken: " + error.what_without_backtrace(),
                     {}, "Make units smaller, or free memory."));
    }
  }
  void* data = block.data.get();
  blocks_->note_taken(block.bytes);
  auto* taken = new Taken{blocks_, std::move(block), is_kept};
  return {data, taken,
          [](void* context) {
            const std::unique_ptr<Taken> last(static_cast<Taken*>(context));
            last->blocks->give_back(std::move(last->block), last->is_kept);
          },
          device_};
}

at::Tensor BufferPool::empty(at::IntArrayRef sizes, at::ScalarType dtype, const char* label) {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor made = at::empty({0}, at::TensorOptions().dtype(dtype).device(device_));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                       take(bytes, label));
  return made.set_(std::move(storage), 0, sizes);
}

int64_t BufferPool::taken_bytes() const { return blocks_->taken(); }

int64_t BufferPool::most_taken_bytes() const { return blocks_->most_taken(); }

}  // namespace trireme
