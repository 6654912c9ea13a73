#include <trireme/activation/offload.h>

#include <trireme/activation/kept_tensor.h>
#include <trireme/activation/offload_file.h>
#include <trireme/activation/operator_watch.h>
#include <trireme/common/error.h>
#include <trireme/memory/stream_handoff.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/DimVector.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

// See [Note: what is offloaded] in offload.h.

namespace trireme {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A tensor with gaps is offloaded with its storage if that is at most this many times as large.
constexpr size_t kMostGaps = 64;
// Ranges begin at multiples of this, so that operators find memory aligned as it was.
constexpr size_t kAlignment = 64;

std::atomic<int64_t> bytes_elsewhere{0};
std::atomic<int64_t> bytes_written{0};

// The storages that have outlived a graph which they had been offloaded for.
class LongLivedStorages {
 public:
  static LongLivedStorages& get() {
    static auto* all = new LongLivedStorages;  // graphs may outlive static objects
    return *all;
  }

  bool has(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    return all_.contains(storage.unsafeGetStorageImpl());
  }

  void add(const WeakStorage& storage) {
    const std::lock_guard lock(mutex_);
    if (all_.size() >= next_sweep_) {
      std::erase_if(all_, [](const auto& entry) { return entry.second.expired(); });
      next_sweep_ = 2 * all_.size() + 64;
    }
    all_.try_emplace(storage._unsafe_get_target(), storage);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> all_;  // their addresses stay reserved
  size_t next_sweep_ = 64;
};

struct ByteRange {
  size_t begin = 0;
  size_t end = 0;

  size_t bytes() const { return end - begin; }
};

// Returns the range of its storage that is offloaded for a tensor; empty if none is.
ByteRange byte_range_of(const at::Tensor& tensor) {
  const size_t item = tensor.itemsize();
  size_t bytes = item;  // elements that a stride of 0 repeats count once
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0) bytes *= static_cast<size_t>(tensor.size(dim));
  }
  const size_t begin = static_cast<size_t>(tensor.storage_offset()) * item;
  const size_t span = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item);
  const size_t whole = tensor.storage().nbytes();
  if (begin + span > whole) return {};  // the storage was freed or shrunk
  if (span <= bytes) return {begin / kAlignment * kAlignment, begin + span};
  return bytes >= whole / kMostGaps ? ByteRange{0, whole} : ByteRange{};
}

// Returns whether a tensor is a plain view of a storage.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && !impl.is_python_dispatch() &&
         tensor.has_storage() && !tensor.is_meta() && !tensor._is_zerotensor();
}

bool is_parameter(const at::Tensor& tensor) {
  const auto trains = [](const at::TensorBase& candidate) {
    return candidate.is_leaf() && candidate.requires_grad();
  };
  return trains(tensor) || (tensor.is_view() && trains(tensor._base()));
}

at::Tensor bytes_of(const c10::Storage& storage, const ByteRange& range) {
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()))
      .set_(storage, static_cast<int64_t>(range.begin), {static_cast<int64_t>(range.bytes())});
}

at::Tensor pinned_bytes(size_t bytes) {
  try {
    return at::empty({static_cast<int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(Error,
                    error_text("checkpoint",
                               c10::str("got no pinned memory for ", bytes,
                                        " bytes to offload: ", error.what_without_backtrace()),
                               {}, "Pass a folder, or recompute in place of it."));
  }
}

// A range of a storage at one version, and its copy.
struct OffloadedRange {
  OffloadedRange(const at::Tensor& tensor, const ByteRange& part, c10::Storage copy)
      : source(tensor.storage().getWeakStorageImpl()),
        version(tensor._version()),
        range(part),
        device(tensor.device()),
        host(std::move(copy)) {
    const auto bytes = static_cast<int64_t>(range.bytes());
    bytes_elsewhere += bytes;
    bytes_written += bytes;
  }
  ~OffloadedRange() {
    bytes_elsewhere -= static_cast<int64_t>(range.bytes());
    if (!source.expired()) LongLivedStorages::get().add(source);
  }
  OffloadedRange(const OffloadedRange&) = delete;
  OffloadedRange& operator=(const OffloadedRange&) = delete;

  bool holds(const at::Tensor& tensor, const ByteRange& wanted) const {
    return version == tensor._version() && range.begin <= wanted.begin && wanted.end <= range.end;
  }

  const WeakStorage source;  // reserves the address
  const int64_t version;
  const ByteRange range;
  const c10::Device device;
  const c10::Storage host;
  // The lock of the OffloadUse guards the members below.
  c10::Storage back;  // device copy, perhaps under way, until all tensors got it
  int64_t tensors = 0;
  int64_t handed_out = 0;  // number of tensors that got `back`
};

using RangePointer = std::shared_ptr<OffloadedRange>;

// All that one use of checkpoint() has offloaded. Lives as long as any of its tensors. Thread-safe.
class OffloadUse : public std::enable_shared_from_this<OffloadUse> {
 public:
  explicit OffloadUse(std::string folder) : folder_(std::move(folder)) {}

  // Returns the range that now holds the tensor's memory; nullptr: the tensor is to be kept.
  RangePointer store(const at::Tensor& tensor);

  // Returns the memory of a range on its device, complete for later work of the current stream.
  c10::Storage fetch(const RangePointer& range);

 private:
  std::unique_lock<std::recursive_mutex> lock() {
    if (!mutex_.try_lock()) SavedTensorHooks::get().lock(mutex_);
    return {mutex_, std::adopt_lock};
  }
  StreamHandoff& copies(c10::Device device) {
    return copies_.try_emplace(device, device).first->second;
  }
  c10::Storage copy_out(const at::Tensor& tensor, const ByteRange& range);
  void bring_back(const std::vector<RangePointer>& ranges);
  void bring_all_back();
  // Starts copying back, or reading files ahead, unless another thread holds the lock.
  void come_ahead();

  const std::string folder_;
  std::recursive_mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl*, std::weak_ptr<OffloadedRange>> ranges_;
  std::unordered_map<c10::Device, StreamHandoff> copies_;
  std::weak_ptr<OffloadUse> before_;  // the next one in a backward
  int task_ = -1;                     // the latest backward that fetched
};

// This thread's latest use that has offloaded anything.
thread_local std::weak_ptr<OffloadUse> latest_use;

RangePointer OffloadUse::store(const at::Tensor& tensor) {
  if (!is_plain(tensor) || is_parameter(tensor) || (tensor.is_cpu() && folder_.empty())) {
    return nullptr;
  }
  const ByteRange wanted = byte_range_of(tensor);
  if (wanted.bytes() < size_t{kLeastOffloadedBytes} ||
      LongLivedStorages::get().has(tensor.storage())) {
    return nullptr;
  }
  const auto held = lock();
  const c10::StorageImpl* const source = tensor.storage().unsafeGetStorageImpl();
  for (auto [known, end] = ranges_.equal_range(source); known != end; ++known) {
    if (RangePointer range = known->second.lock(); range && range->holds(tensor, wanted)) {
      ++range->tensors;
      return range;
    }
  }
  auto range = std::make_shared<OffloadedRange>(tensor, wanted, copy_out(tensor, wanted));
  if (ranges_.empty()) before_ = std::exchange(latest_use, weak_from_this());
  ranges_.emplace(source, range);
  ++range->tensors;
  return range;
}

c10::Storage OffloadUse::copy_out(const at::Tensor& tensor, const ByteRange& range) {
  const c10::Storage& storage = tensor.storage();
  if (tensor.is_cpu()) {
    const auto* const begin = static_cast<const std::byte*>(storage.data()) + range.begin;
    return write_offloaded(folder_, begin, range.bytes());
  }
  const at::Tensor source = bytes_of(storage, range);
  if (!folder_.empty()) {
    const at::Tensor host = source.cpu();
    return write_offloaded(folder_, host.const_data_ptr(), range.bytes());
  }
  const at::Tensor host = pinned_bytes(range.bytes());
  copies(tensor.device()).beside([&] {
    StreamHandoff::keep(source);
    host.copy_(source, /*non_blocking=*/true);
  });
  return host.storage();
}

c10::Storage OffloadUse::fetch(const RangePointer& range) {
  const auto held = lock();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != -1 && std::exchange(task_, task) != task) {
    bring_all_back();
    if (const auto before = before_.lock()) before->come_ahead();
  }
  if (range->device.is_cpu()) return range->host;
  if (!range->back) bring_back({range});
  copies(range->device).join();
  c10::Storage found = range->back;
  if (++range->handed_out == range->tensors) {
    // From here on a graph retained for another backward takes no device memory.
    range->back = c10::Storage();
    range->handed_out = 0;
  }
  return found;
}

void OffloadUse::bring_back(const std::vector<RangePointer>& ranges) {
  // Allocates all memory first: if there is not enough, no copy begins. The memory belongs to the
  // computing stream, so the side streams of the uses keep none cached.
  std::vector<at::Tensor> places;
  places.reserve(ranges.size());
  for (const RangePointer& range : ranges) {
    places.push_back(at::empty({static_cast<int64_t>(range->range.bytes())},
                               at::TensorOptions().dtype(at::kByte).device(range->device)));
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    OffloadedRange& range = *ranges[i];
    const at::Tensor host = bytes_of(range.host, {0, range.range.bytes()});
    copies(range.device).beside([&] {
      StreamHandoff::keep(places[i]);
      places[i].copy_(host, /*non_blocking=*/true);
    });
    range.back = places[i].storage();
    range.handed_out = 0;
  }
}

void OffloadUse::bring_all_back() {
  std::vector<RangePointer> away;
  for (const auto& [source, known] : ranges_) {
    RangePointer range = known.lock();
    if (range && !range->device.is_cpu() && !range->back) away.push_back(std::move(range));
  }
  bring_back(away);
}

void OffloadUse::come_ahead() {
  const std::unique_lock held(mutex_, std::try_to_lock);
  if (!held) return;
  if (folder_.empty()) {
    try {
      bring_all_back();
    } catch (const c10::OutOfMemoryError&) {  // The fetch of that use tries again.
    }
    return;
  }
  for (const auto& [source, known] : ranges_) {
    if (const RangePointer range = known.lock()) read_ahead(range->host);
  }
}

class OffloadedTensor : public PackedSavedTensor {
 public:
  OffloadedTensor(const at::Tensor& tensor, std::shared_ptr<OffloadUse> use, RangePointer range)
      : use_(std::move(use)),
        range_(std::move(range)),
        keys_(tensor.key_set()),
        dtype_(tensor.dtype()),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        offset_(tensor.storage_offset() -
                static_cast<int64_t>(range_->range.begin / tensor.itemsize())),
        version_(tensor) {}

  at::Tensor unpack() override {
    if (version_.has_changed()) version_.refuse(c10::str(dtype_, at::IntArrayRef(sizes_)));
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, use_->fetch(range_), keys_, dtype_);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset_);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_);
    StreamHandoff::keep(tensor);  // its memory may belong to another stream
    return tensor;
  }

 private:
  std::shared_ptr<OffloadUse> use_;
  RangePointer range_;
  c10::DispatchKeySet keys_;  // with the bits of conj() and neg()
  caffe2::TypeMeta dtype_;
  at::DimVector sizes_;
  at::DimVector strides_;
  int64_t offset_;
  SavedVersion version_;
};

// A tensor kept as it is until its operator has written it, then offloaded. Thread-safe.
class UnfinishedTensor : public PackedSavedTensor {
 public:
  explicit UnfinishedTensor(const at::Tensor& tensor)
      : written_(tensor.detach()),
        version_(tensor),
        packed_(c10::make_intrusive<KeptTensor>(tensor)) {}

  // Called when the operator is over: offloads the tensor. Throws if there is no room for it.
  void finish(const std::shared_ptr<OffloadUse>& use) {
    const at::Tensor written = std::exchange(written_, {});
    if (version_.has_changed()) return;  // autograd refuses it
    if (RangePointer range = use->store(written)) {
      auto packed = c10::make_intrusive<OffloadedTensor>(written, use, std::move(range));
      const std::lock_guard lock(mutex_);
      packed_ = std::move(packed);
    }
  }

  at::Tensor unpack() override {
    c10::intrusive_ptr<PackedSavedTensor> packed;
    {
      const std::lock_guard lock(mutex_);
      packed = packed_;
    }
    return packed->unpack();
  }

 private:
  at::Tensor written_;
  SavedVersion version_;
  std::mutex mutex_;
  c10::intrusive_ptr<PackedSavedTensor> packed_;
};

class OffloadPacker : public SavedTensorPacker {
 public:
  explicit OffloadPacker(std::string folder)
      : use_(std::make_shared<OffloadUse>(std::move(folder))) {}

  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override {
    if (may_write_what_it_saves()) {
      if (is_parameter(tensor)) return c10::make_intrusive<KeptTensor>(tensor);
      const std::lock_guard lock(mutex_);
      return unfinished_[std::this_thread::get_id()].emplace_back(
          c10::make_intrusive<UnfinishedTensor>(tensor));
    }
    finish();
    if (RangePointer range = use_->store(tensor)) {
      return c10::make_intrusive<OffloadedTensor>(tensor, use_, std::move(range));
    }
    return c10::make_intrusive<KeptTensor>(tensor);
  }

  bool watches_operators() const override { return true; }

  // Cannot throw, so tensors that find no room are kept as they are.
  void end() noexcept override {
    try {
      finish();
    } catch (const std::exception&) {
    }
  }

 private:
  // Finishes this thread's tensors, whose operator is over; replicas pack on threads of their own.
  void finish() {
    std::vector<c10::intrusive_ptr<UnfinishedTensor>> own;
    {
      const std::lock_guard lock(mutex_);
      if (unfinished_.empty()) return;
      const auto found = unfinished_.find(std::this_thread::get_id());
      if (found == unfinished_.end()) return;
      own = std::move(found->second);
      unfinished_.erase(found);
    }
    for (const auto& one : own) one->finish(use_);
  }

  std::shared_ptr<OffloadUse> use_;
  std::mutex mutex_;
  std::unordered_map<std::thread::id, std::vector<c10::intrusive_ptr<UnfinishedTensor>>>
      unfinished_;
};

}  // namespace

c10::intrusive_ptr<SavedTensorPacker> make_offload_packer(const ActivationOffload& offload) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      offload.folder.empty() || std::filesystem::is_directory(offload.folder, ignored),
      error_text("checkpoint",
                 "got '" + offload.folder + "' to offload to, expected a folder that exists", {},
                 "Make it, on a disk with room for what autograd saves."));
  return c10::make_intrusive<OffloadPacker>(offload.folder);
}

OffloadedBytes offloaded_bytes() { return {bytes_elsewhere, bytes_written}; }

}  // namespace trireme
