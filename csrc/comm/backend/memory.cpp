#include <trireme/comm/backend/memory.h>

#include <trireme/common/fork_guard.h>
#include <trireme/shm/fault.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

namespace trireme {
namespace {

using SegmentPtr = std::shared_ptr<const shm::Segment>;

constexpr int64_t kKeptBytes = int64_t{256} << 20;
constexpr int64_t kPage = 4096;

// Returns an eighth more than asked for at most, so that sizes which differ a little fit each
// other.
int64_t rounded(int64_t bytes) {
  int64_t step = kPage;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

class ShmAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    const int64_t needed = rounded(static_cast<int64_t>(bytes));
    SegmentPtr segment = take_segment(needed);
    if (!segment) {
      try {
        segment = std::make_shared<const shm::Segment>(
            shm::Segment::create(shm::SegmentKind::kAnonymous, needed));
      } catch (const shm::Fault& fault) {
        C10_THROW_ERROR(DistBackendError, fault.what());
      }
    }
    std::byte* data = segment->data();
    auto* block = new Block{std::move(segment)};
    return {data, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  SegmentPtr segment_of(const c10::DataPtr& data) const {
    if (data.get_deleter() != &release || data.get_context() == nullptr) return nullptr;
    return static_cast<Block*>(data.get_context())->segment;
  }

 private:
  struct Block {
    SegmentPtr segment;
    ForkGuard fork_guard = {};
  };

  static void release(void* context);

  SegmentPtr take_segment(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(fork_guard_, {}).in_child()) {
      kept_.clear();
      kept_bytes_ = 0;
    }
    const auto fits = std::find_if(kept_.rbegin(), kept_.rend(), [&](const SegmentPtr& candidate) {
      return candidate->bytes() == bytes;
    });
    if (fits == kept_.rend()) return nullptr;
    SegmentPtr segment = *fits;
    kept_.erase(std::next(fits).base());
    kept_bytes_ -= bytes;
    return segment;
  }

  // Keeps a segment unless another owner (a window) still holds it: that one then frees it.
  void keep(SegmentPtr segment) {
    std::deque<SegmentPtr> dropped;  // after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    if (segment.use_count() != 1 || segment->bytes() > kKeptBytes) return;
    kept_bytes_ += segment->bytes();
    kept_.push_back(std::move(segment));
    while (kept_bytes_ > kKeptBytes) {
      kept_bytes_ -= kept_.front()->bytes();
      dropped.push_back(std::move(kept_.front()));
      kept_.pop_front();
    }
  }

  std::mutex mutex_;
  std::deque<SegmentPtr> kept_;  // the oldest first
  int64_t kept_bytes_ = 0;
  ForkGuard fork_guard_;
};

ShmAllocator& allocator() {
  static auto* allocator = new ShmAllocator;  // storages may outlive static objects
  return *allocator;
}

void ShmAllocator::release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  // Memory taken before a fork is the parent's, too.
  if (block && !block->fork_guard.in_child()) allocator().keep(std::move(block->segment));
}

}  // namespace

std::shared_ptr<c10::Allocator> shm_allocator() {
  return {&allocator(), [](c10::Allocator*) {}};
}

std::shared_ptr<const shm::Segment> segment_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return nullptr;
  return allocator().segment_of(tensor.storage().data_ptr());
}

}  // namespace trireme
