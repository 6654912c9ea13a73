#include <trireme/memory/snapshot.h>

#include <trireme/common/forks.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

// See [Note: the values of one moment, read beside training] in snapshot.h.

namespace trireme {
namespace {

constexpr int64_t kBlockBytes = int64_t{1} << 20;

// The snapshots of this process that are still read. Never destroyed: writers may come late.
struct LivingSnapshots {
  std::mutex mutex;
  std::vector<std::weak_ptr<Snapshot>> all;
  std::atomic<int64_t> count{0};

  static LivingSnapshots& instance() {
    static auto& living = *new LivingSnapshots;
    return living;
  }

  void add(const std::shared_ptr<Snapshot>& snapshot) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(all, [](const auto& one) { return one.expired(); });
    all.push_back(snapshot);
    count = static_cast<int64_t>(all.size());
  }

  void remove(const Snapshot* snapshot) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(all, [&](const auto& one) {
      const auto alive = one.lock();
      return alive == nullptr || alive.get() == snapshot;
    });
    count = static_cast<int64_t>(all.size());
  }

  std::vector<std::shared_ptr<Snapshot>> now() {
    std::vector<std::shared_ptr<Snapshot>> found;
    if (count == 0) return found;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& one : all)
      if (auto alive = one.lock()) found.push_back(std::move(alive));
    return found;
  }
};

int64_t counted_version(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

int64_t nanoseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                              begin)
      .count();
}

}  // namespace

std::shared_ptr<Snapshot> Snapshot::make(std::vector<at::Tensor> tensors,
                                         const std::vector<at::Tensor>& written) {
  const std::shared_ptr<Snapshot> snapshot(new Snapshot(std::move(tensors)));
  for (const at::Tensor& tensor : written) snapshot->written_.insert(tensor.unsafeGetTensorImpl());
  LivingSnapshots::instance().add(snapshot);
  return snapshot;
}

Snapshot::Snapshot(std::vector<at::Tensor> tensors)
    : tensors_(std::move(tensors)), born_(forks_so_far()), is_overwritten_(tensors_.size()) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& tensor = tensors_[i];
    TORCH_INTERNAL_ASSERT(tensor.is_cpu() && tensor.is_contiguous());
    versions_.push_back(counted_version(tensor));
    first_block_.push_back(blocks_.size());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t begin = 0; begin < bytes; begin += kBlockBytes)
      blocks_.push_back({i, begin, std::min(kBlockBytes, bytes - begin)});
  }
  first_block_.push_back(blocks_.size());
}

const char* Snapshot::place_of(const Block& block) const {
  return static_cast<const char*>(tensors_[block.tensor].const_data_ptr()) + block.begin;
}

bool Snapshot::read(size_t tensor, const Visit& visit) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (size_t i = first_block_[tensor]; i < first_block_[tensor + 1]; ++i) {
    Block& block = blocks_[i];
    changed_.wait(lock, [&] { return block.state != State::kCopying; });
    if (!is_overwritten_[tensor]) read_block(block, visit, lock);
    if (is_overwritten_[tensor]) return false;
  }
  return true;
}

void Snapshot::read_block(Block& block, const Visit& visit, std::unique_lock<std::mutex>& lock) {
  const bool is_in_place = block.state == State::kInPlace;
  const char* place = is_in_place ? place_of(block) : block.copy.get();
  if (is_in_place) block.state = State::kReading;
  lock.unlock();
  try {
    visit(block.begin, {place, static_cast<size_t>(block.bytes)});
  } catch (...) {
    lock.lock();
    finish(block);
    throw;
  }
  lock.lock();
  if (is_in_place) compare_version(block.tensor);
  finish(block);
}

void Snapshot::finish(Block& block) {
  block.state = State::kDone;
  block.copy.reset();
  changed_.notify_all();
}

// To be called while no announced writer may write the tensor.
void Snapshot::compare_version(size_t tensor) {
  if (counted_version(tensors_[tensor]) != versions_[tensor]) is_overwritten_[tensor] = true;
}

void Snapshot::keep() noexcept {
  if (born_ != forks_so_far()) return;  // the reader is in the parent
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  for (size_t i = blocks_.size(); i-- > 0 && !is_closed_;) {
    Block& block = blocks_[i];
    if (block.state == State::kInPlace) copy_block(block, lock);
    changed_.wait(lock, [&] {
      return is_closed_ || (block.state != State::kReading && block.state != State::kCopying &&
                            block.state != State::kInPlace);
    });
  }
  stalled_ns_ += nanoseconds_since(begin);
}

// Leaves the block in place, for the reader, if there is no memory for a copy.
void Snapshot::copy_block(Block& block, std::unique_lock<std::mutex>& lock) {
  std::unique_ptr<char[]> copy(new (std::nothrow) char[static_cast<size_t>(block.bytes)]);
  if (copy == nullptr) return;
  block.state = State::kCopying;
  lock.unlock();
  std::memcpy(copy.get(), place_of(block), static_cast<size_t>(block.bytes));
  lock.lock();
  compare_version(block.tensor);
  block.copy = std::move(copy);
  block.state = State::kCopied;
  copied_bytes_ += block.bytes;
  changed_.notify_all();
}

void Snapshot::close() noexcept {
  LivingSnapshots::instance().remove(this);
  std::unique_lock<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
  for (const Block& block : blocks_)
    changed_.wait(lock, [&] { return block.state != State::kCopying; });
  for (Block& block : blocks_) block.copy.reset();
  tensors_.clear();
}

void keep_snapshots_of(const std::vector<at::Tensor>& tensors) noexcept {
  for (const auto& snapshot : LivingSnapshots::instance().now())
    if (std::any_of(tensors.begin(), tensors.end(),
                    [&](const at::Tensor& one) { return snapshot->is_written_with(one); }))
      snapshot->keep();
}

void keep_all_snapshots() noexcept {
  for (const auto& snapshot : LivingSnapshots::instance().now()) snapshot->keep();
}

bool has_snapshots() noexcept { return LivingSnapshots::instance().count > 0; }

}  // namespace trireme
