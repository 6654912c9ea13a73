#include <ATen/ATen.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstring>
#include <device/sim_device.h>
#include <device/sim_stream.h>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace trireme::test {
namespace {

// Never used twice, so that who comes late is seen.
constexpr int64_t kAddressesOfADevice = int64_t{1} << 33;
constexpr int64_t kAddresses = kSimDevices * kAddressesOfADevice;
constexpr int64_t kAlign = 512;  // CUDA's
constexpr int kPoison = 0xFF;    // NaN in every floating-point dtype

std::atomic<int64_t> bytes_taken{0};
std::atomic<int64_t> bytes_left{-1};

// One file, mapped twice: where tensors point to, and where streams' tasks read and write.
struct Arena {
  Arena() {
    const int file = ::memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, kAddresses) == 0, "no memory for the sim device");
    const auto map = [&](int access) {
      void* begin = ::mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(begin != MAP_FAILED, "no addresses for the sim device");
      return static_cast<std::byte*>(begin);
    };
    shown = map(PROT_NONE);
    host = map(PROT_READ | PROT_WRITE);
    ::close(file);
  }
  std::byte* shown;
  std::byte* host;
  std::array<std::atomic<int64_t>, kSimDevices> next{};
};

Arena& arena() {
  static Arena instance;
  return instance;
}

struct Block {
  void* shown;
  int64_t bytes;
  SimStream* stream;  // that allocated it
  std::mutex mutex;
  std::vector<SimStream*> readers;
};

void poison(Block& block) {
  std::byte* begin = static_cast<std::byte*>(on_host(block.shown));
  std::memset(begin, kPoison, static_cast<size_t>(block.bytes));
}

void free_block(void* context) {
  const std::shared_ptr<Block> block(static_cast<Block*>(context));
  bytes_taken -= block->bytes;
  for (SimStream* reader : block->readers) test::block(*block->stream, event_of(*reader));
  block->stream->enqueue([block] { poison(*block); }, std::chrono::microseconds(0));
}

struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    const c10::impl::VirtualGuardImpl guard(kSim);
    const c10::Device device = guard.getDevice();
    const auto bytes = static_cast<int64_t>(wanted);
    if (bytes == 0) return {nullptr, device};
    if (bytes_left >= 0 && (bytes_left -= bytes) < 0) {
      bytes_left += bytes;  // less may fit
      C10_THROW_ERROR(OutOfMemoryError, "sim out of memory");
    }
    const auto place = static_cast<size_t>(device.index());
    const int64_t offset = arena().next.at(place).fetch_add((bytes + kAlign - 1) / kAlign * kAlign);
    auto* block = new Block{.shown = arena().shown + device.index() * kAddressesOfADevice + offset,
                            .bytes = bytes,
                            .stream = &sim_stream(guard.getStream(device)),
                            .mutex = {},
                            .readers = {}};
    poison(*block);
    bytes_taken += bytes;
    return {block->shown, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(on_host(to), on_host(const_cast<void*>(from)), bytes);
  }
};

std::mutex pinned_mutex;
std::map<const std::byte*, size_t> pinned_blocks;
std::atomic<bool> pinned_is_refused{false};

void free_pinned(void* address) {
  {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const std::byte*>(address));
  }
  c10::free_cpu(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!pinned_is_refused, "sim refuses to lock pages");
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* address = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const std::byte*>(address)] = bytes;
    return {address, address, &free_pinned, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

void* on_host(void* address) {
  if (address == nullptr) return nullptr;
  return arena().host + (static_cast<std::byte*>(address) - arena().shown);
}

at::Tensor on_host(const at::Tensor& tensor) {
  const at::TensorOptions options = at::TensorOptions().dtype(tensor.scalar_type());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(on_host(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

c10::Device device_of(const void* address) {
  const auto offset = static_cast<const std::byte*>(address) - arena().shown;
  return sim_device(offset / kAddressesOfADevice);
}

c10::Allocator& sim_allocator() {
  static SimAllocator instance;
  return instance;
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_deleter() != &free_block) return;
  auto& block = *static_cast<Block*>(data.get_context());
  const std::lock_guard<std::mutex> lock(block.mutex);
  block.readers.push_back(&sim_stream(stream));
}

int64_t sim_bytes() { return bytes_taken; }
void limit_sim_bytes(int64_t bytes) { bytes_left = bytes; }

c10::Allocator& pinned_allocator() {
  static PinnedAllocator instance;
  return instance;
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto* byte = static_cast<const std::byte*>(address);
  auto next = pinned_blocks.upper_bound(byte);
  if (next == pinned_blocks.begin()) return false;
  --next;
  return byte < next->first + next->second;
}

void refuse_pinned(bool refused) { pinned_is_refused = refused; }

}  // namespace trireme::test
