#include <trireme/activation/activation_cache.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/memory/value_hash.h>
#include <trireme/shm/segment.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kEntryAlignBytes = 64;
constexpr size_t kMostDims = 16;

int64_t padded(int64_t bytes) {
  return (bytes + kEntryAlignBytes - 1) / kEntryAlignBytes * kEntryAlignBytes;
}

// Never 0.
uint64_t hash_of(const CacheForm& form) {
  std::vector<int64_t> numbers = form.sizes;
  numbers.push_back(static_cast<int64_t>(form.dtype));
  return hash_of_bytes(numbers.data(), numbers.size() * sizeof(int64_t)) | 1U;
}

}  // namespace

// Zeros are a head without a form. All ranks that say the form of which `said` is the hash write
// it, so that none waits for another one, who may have been killed meanwhile.
struct alignas(kEntryAlignBytes) ActivationCache::Head {
  std::atomic<uint64_t> said;
  std::atomic<uint64_t> is_known;  // whether what follows was written
  std::atomic<int64_t> dims;
  std::array<std::atomic<int64_t>, kMostDims> sizes;
  std::atomic<int64_t> dtype;
  std::atomic<int64_t> row_bytes;
  std::atomic<int64_t> entries;
  std::atomic<uint64_t> is_off;
};

// Zeros are a record of nothing.
struct alignas(kEntryAlignBytes) ActivationCache::Record {
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> input;
  std::atomic<uint64_t> layers;
  std::atomic<int64_t> depth;
};

size_t CacheForm::bytes() const {
  const int64_t numel =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
  return static_cast<size_t>(numel) * c10::elementSize(dtype);
}

ActivationCache::ActivationCache(int64_t samples, int64_t bytes,
                                 std::shared_ptr<Communicator> communicator)
    : samples_(samples), bytes_(bytes), communicator_(std::move(communicator)) {
  if (communicator_) where_ = communicator_->rank_of();
  if (communicator_) {
    const ComparedText own{c10::str(samples, " samples\n", bytes, " bytes"), "activation cache"};
    const auto texts = distinct_texts(own, *communicator_, communicator_->device());
    if (const auto found = first_difference(texts))
      refuse(c10::str("got ", found->first, " on rank 0, ", found->other, " on rank ", found->rank),
             "Give all ranks the same.");
  }
  const int64_t least = static_cast<int64_t>(sizeof(Head) + sizeof(Record)) + kEntryAlignBytes;
  if (samples < 1)
    refuse(c10::str("got ", samples, " samples, expected 1 or more"),
           "Pass the number of samples of the data set.");
  if (bytes < least)
    refuse(c10::str("got ", bytes, " bytes, expected ", least, " or more"),
           "Pass what all ranks of a host may take together.");
  if (!communicator_ || communicator_->world() == 1) {
    own_ = lazy_zeros(bytes, at::kByte, at::kCPU);
    data_ = reinterpret_cast<std::byte*>(own_.mutable_data_ptr<uint8_t>());
    return;
  }
  Host* host = communicator_->host();
  if (host == nullptr)
    refuse("got a group whose ranks share no memory, expected one of the backend trireme",
           "Pass group=torch.distributed.new_group(backend=\"trireme\").");
  HostMemory memory = host->share_host_memory(bytes, "activation cache");
  if (!memory.memory.segment)
    refuse(c10::str("got no memory for ", bytes, " bytes: ", memory.memory.why_not),
           "Pass fewer bytes.");
  segment_ = std::move(memory.memory.segment);
  data_ = segment_->data();
}

ActivationCache::~ActivationCache() = default;

void ActivationCache::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text("cache", got, where_, next_step));
}

ActivationCache::Head& ActivationCache::head() const { return *reinterpret_cast<Head*>(data_); }

ActivationCache::Record& ActivationCache::record(int64_t id) const {
  return reinterpret_cast<Record*>(data_ + sizeof(Head))[id];
}

std::byte* ActivationCache::row(int64_t id) const {
  const Head& known = head();
  return data_ + sizeof(Head) + static_cast<size_t>(known.entries) * sizeof(Record) +
         static_cast<size_t>(id * padded(known.row_bytes));
}

std::optional<CacheForm> ActivationCache::form() const {
  const Head& known = head();
  if (known.is_known.load(std::memory_order_acquire) == 0) return std::nullopt;
  return CacheForm{{known.sizes.begin(), known.sizes.begin() + known.dims},
                   static_cast<at::ScalarType>(known.dtype.load())};
}

void ActivationCache::set_form(const CacheForm& form) {
  const auto row_bytes = static_cast<int64_t>(form.bytes());
  const int64_t each = static_cast<int64_t>(sizeof(Record)) + padded(row_bytes);
  const int64_t entries = (bytes_ - static_cast<int64_t>(sizeof(Head))) / each;
  if (form.sizes.size() > kMostDims)
    refuse(c10::str("got rows of ", form.sizes.size(), " dimensions, expected at most ", kMostDims),
           "Let the last layer return fewer.");
  if (entries < 1)
    refuse(c10::str("got ", bytes_, " bytes for rows of ", row_bytes, ", expected room for one"),
           "Pass more bytes.");
  Head& known = head();
  const uint64_t own = hash_of(form);
  uint64_t said = 0;
  if (!known.said.compare_exchange_strong(said, own) && said != own) return;
  known.dims = static_cast<int64_t>(form.sizes.size());
  std::copy(form.sizes.begin(), form.sizes.end(), known.sizes.begin());
  known.dtype = static_cast<int64_t>(form.dtype);
  known.row_bytes = row_bytes;
  known.entries = std::min(entries, samples_);
  known.is_known.store(1, std::memory_order_release);
}

int64_t ActivationCache::entries() const {
  return head().is_known.load(std::memory_order_acquire) != 0 ? head().entries.load() : 0;
}

int64_t ActivationCache::read(CacheRow wanted, const std::vector<uint64_t>& layers,
                              std::byte* into) const {
  if (wanted.id >= entries()) return 0;
  const Record& found = record(wanted.id);
  const uint64_t sequence = found.sequence.load(std::memory_order_acquire);
  if (sequence == 0 || sequence % 2 == 1) return 0;
  const auto is_as_it_was = [&] {
    std::atomic_thread_fence(std::memory_order_acquire);
    return found.sequence.load(std::memory_order_relaxed) == sequence;
  };
  const uint64_t input = found.input.load(std::memory_order_relaxed);
  const uint64_t through = found.layers.load(std::memory_order_relaxed);
  const int64_t depth = found.depth.load(std::memory_order_relaxed);
  if (input != wanted.input) return is_as_it_was() ? kOtherInput : 0;
  if (depth < 1 || depth > static_cast<int64_t>(layers.size()) ||
      through != layers[static_cast<size_t>(depth - 1)])
    return 0;
  std::memcpy(into, row(wanted.id), static_cast<size_t>(head().row_bytes));
  return is_as_it_was() ? depth : 0;
}

std::optional<ActivationCache::Store> ActivationCache::begin_store(
    CacheRow wanted, const std::vector<uint64_t>& layers, bool& is_other_input) {
  if (wanted.id >= entries()) return std::nullopt;
  Record& found = record(wanted.id);
  uint64_t sequence = found.sequence.load(std::memory_order_acquire);
  if (sequence % 2 == 1) return std::nullopt;
  const auto depth = static_cast<int64_t>(layers.size());
  if (sequence != 0) {
    const bool is_same = found.input.load(std::memory_order_relaxed) == wanted.input;
    const bool is_there = is_same && found.depth.load(std::memory_order_relaxed) == depth &&
                          found.layers.load(std::memory_order_relaxed) == layers.back();
    std::atomic_thread_fence(std::memory_order_acquire);
    if (found.sequence.load(std::memory_order_relaxed) != sequence) return std::nullopt;
    if (!is_same) is_other_input = true;
    if (!is_same || is_there) return std::nullopt;
  }
  if (!found.sequence.compare_exchange_strong(sequence, sequence + 1)) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_release);
  found.input.store(wanted.input, std::memory_order_relaxed);
  found.layers.store(layers.back(), std::memory_order_relaxed);
  found.depth.store(depth, std::memory_order_relaxed);
  return Store(found.sequence, sequence + 1, row(wanted.id));
}

void ActivationCache::Store::end() { sequence_.store(odd_ + 1, std::memory_order_release); }

void ActivationCache::count(const CacheStats& more) {
  const std::lock_guard lock(counting_);
  stats_.hits += more.hits;
  stats_.misses += more.misses;
  stats_.bytes += more.bytes;
  stats_.depth = std::max(stats_.depth, more.depth);
}

CacheStats ActivationCache::stats() const {
  const std::lock_guard lock(counting_);
  return stats_;
}

void ActivationCache::turn_off() { head().is_off.store(1, std::memory_order_release); }

bool ActivationCache::is_off() const { return head().is_off.load(std::memory_order_acquire) != 0; }

}  // namespace trireme
