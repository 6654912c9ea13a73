#include <trireme/memory/tensor_samples.h>

#include <trireme/common/resolved.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

// See [Note: samples] in tensor_samples.h.

namespace trireme {
namespace {

constexpr int64_t kPerTensor = 4;
constexpr int64_t kPerMib = 8;
constexpr int64_t kMib = int64_t{1} << 20;

// A gradient may be scaled, and scaled again: each product is rounded once, the quotient here, too.
constexpr double kRoundings = 4;

// Returns the next of a sequence of 64-bit numbers that look random (splitmix64).
uint64_t scattered(uint64_t& state) {
  uint64_t mixed = state += 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31U);
}

struct PositionsRequest {
  int64_t numel;
  int64_t item_bytes;
  uint64_t seed;
};

// See sample_positions().
template <typename Visit>
void for_each_position(PositionsRequest request, const Visit& visit) {
  const auto [numel, item_bytes, seed] = request;
  const int64_t count = std::min(numel, kPerTensor + kPerMib * (numel * item_bytes / kMib));
  if (count > 0) visit(0);
  uint64_t state = seed;
  for (int64_t i = 1; i + 1 < count; ++i) {
    // There is one element of each stretch; the first ones are longer by one if numel has a rest.
    const int64_t longer = numel % count;
    const int64_t length = numel / count + (i < longer ? 1 : 0);
    const int64_t begin = i * (numel / count) + std::min(i, longer);
    visit(begin + static_cast<int64_t>(scattered(state) % static_cast<uint64_t>(length)));
  }
  if (count > 1) visit(numel - 1);
}

template <typename Number>
double number_at(const std::byte* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof(Number));
  return static_cast<double>(number);
}

// How to read the numbers of a dtype; a complex element is two of them.
struct NumberFormat {
  double (*read)(const std::byte*) = nullptr;  // null: no dtype of gradients
  size_t bytes = 1;
  double roundoff = 0;
  double smallest = 0;
};

template <typename Number>
NumberFormat format_of() {
  using Limits = std::numeric_limits<Number>;
  return {&number_at<Number>, sizeof(Number), static_cast<double>(Limits::epsilon()) / 2,
          static_cast<double>(Limits::min())};
}

NumberFormat format_of(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kFloat:
      return format_of<float>();
    case at::kDouble:
      return format_of<double>();
    case at::kHalf:
      return format_of<c10::Half>();
    case at::kBFloat16:
      return format_of<c10::BFloat16>();
    default:
      return {};
  }
}

}  // namespace

std::vector<int64_t> sample_positions(int64_t numel, int64_t item_bytes, uint64_t seed) {
  std::vector<int64_t> positions;
  for_each_position({numel, item_bytes, seed},
                    [&](int64_t position) { positions.push_back(position); });
  return positions;
}

FactorRange FactorRange::operator&(const FactorRange& other) const {
  return {std::max(least, other.least), std::min(most, other.most)};
}

void CommonFactor::add(const Pair& pair) {
  const double before = std::abs(pair.before);
  const double now = std::abs(pair.now);
  const bool tells = before >= pair.smallest && now >= pair.smallest && std::isfinite(before) &&
                     std::isfinite(now);
  if (!tells) return;
  const double factor = pair.now / pair.before;
  const double slack = std::abs(factor) * kRoundings * pair.roundoff;
  range_ = range_ & FactorRange{factor - slack, factor + slack};
  const auto end = magnitudes_.begin() + static_cast<std::ptrdiff_t>(seen_);
  if (seen_ < kFewest && std::find(magnitudes_.begin(), end, before) == end)
    magnitudes_[seen_++] = before;
}

FactorRange CommonFactor::range() const {
  return seen_ < kFewest || range_.is_empty() ? FactorRange{} : range_;
}

SampledMemory SampledMemory::of(const at::Tensor& tensor) {
  const bool lies_there = tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
                          tensor.numel() > 0 && tensor.is_non_overlapping_and_dense() &&
                          is_resolved(tensor);
  if (!lies_there) return {};
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.numel(),
          tensor.scalar_type()};
}

SampledMemory SampledMemory::part(int64_t begin, int64_t part_numel) const {
  if (data == nullptr || part_numel <= 0 || begin < 0 || begin + part_numel > numel) return {};
  return {data + begin * static_cast<int64_t>(c10::elementSize(dtype)), part_numel, dtype};
}

void TensorSamples::read(size_t tensor, const SampledMemory& memory) {
  if (sampled_.size() <= tensor) sampled_.resize(tensor + 1);
  Sampled& sampled = sampled_[tensor];
  sampled.numel = memory.data == nullptr ? -1 : memory.numel;
  sampled.dtype = memory.dtype;
  sampled.samples.clear();
  if (memory.data == nullptr) return;
  const size_t item_bytes = c10::elementSize(memory.dtype);
  uint64_t state = seed_ + (++reads_ << 20U);
  const PositionsRequest request{memory.numel, static_cast<int64_t>(item_bytes), scattered(state)};
  for_each_position(request, [&](int64_t position) {
    Sample& sample = sampled.samples.emplace_back(Sample{position, {}});
    std::memcpy(sample.value.data(), memory.data + static_cast<size_t>(position) * item_bytes,
                std::min(item_bytes, sample.value.size()));
  });
}

// Keeps the memory for the next read().
void TensorSamples::clear() {
  for (Sampled& sampled : sampled_) sampled.numel = -1;
}

const TensorSamples::Sampled* TensorSamples::same(size_t tensor, const SampledMemory& now) const {
  if (tensor >= sampled_.size() || now.data == nullptr) return nullptr;
  const Sampled& sampled = sampled_[tensor];
  return sampled.numel == now.numel && sampled.dtype == now.dtype ? &sampled : nullptr;
}

bool TensorSamples::is_changed(size_t tensor, const SampledMemory& now) const {
  const Sampled* const sampled = same(tensor, now);
  if (sampled == nullptr) return false;
  const size_t item_bytes = c10::elementSize(now.dtype);
  return std::any_of(sampled->samples.begin(), sampled->samples.end(), [&](const Sample& sample) {
    return std::memcmp(sample.value.data(),
                       now.data + static_cast<size_t>(sample.position) * item_bytes,
                       std::min(item_bytes, sample.value.size())) != 0;
  });
}

void TensorSamples::compare(size_t tensor, const SampledMemory& now, CommonFactor& factor) const {
  const Sampled* const sampled = same(tensor, now);
  const NumberFormat format = format_of(now.dtype);
  if (sampled == nullptr || format.read == nullptr) return;
  const size_t item_bytes = c10::elementSize(now.dtype);
  for (const Sample& sample : sampled->samples) {
    const std::byte* const there = now.data + static_cast<size_t>(sample.position) * item_bytes;
    for (size_t offset = 0; offset < item_bytes; offset += format.bytes)
      factor.add({format.read(sample.value.data() + offset), format.read(there + offset),
                  format.roundoff, format.smallest});
  }
}

}  // namespace trireme
