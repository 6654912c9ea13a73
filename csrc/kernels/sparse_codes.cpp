#include <trireme/kernels/sparse_codes.h>

#include <trireme/common/error.h>
#include <trireme/common/half.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kPlaceBits = 32;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

const cpu::SparseLoops& best_sparse_loops() {
  static const cpu::SparseLoops& best = cpu::supported_sparse_loops().back();
  return best;
}

// The two sizes of a chunk's values.
struct Sizes {
  cpu::Half small;
  cpu::Half large;
};

bool has_sizes(const SparseFormat& format) { return format.bits == 2; }

// Returns the bits of a place, and of a sign and a size if they are beside it.
int64_t bits_of_number(const SparseFormat& format) {
  if (format.chunk == 0) return kPlaceBits;
  return std::bit_width(static_cast<uint64_t>(format.chunk)) - 1 + (has_sizes(format) ? 2 : 0);
}

// Returns the bytes in front of the numbers.
int64_t bytes_of_values(const SparseFormat& format, int64_t numel) {
  if (!has_sizes(format)) return format.count(numel) * kFloatBytes;
  return (numel + format.chunk - 1) / format.chunk * static_cast<int64_t>(sizeof(Sizes));
}

// Calls visit(begin, numel) for each run whose largest values are sent.
template <typename Visit>
void for_runs(const SparseFormat& format, int64_t numel, const Visit& visit) {
  const int64_t length = format.chunk == 0 ? numel : format.chunk;
  for (int64_t begin = 0; begin < numel; begin += length)
    visit(begin, std::min(length, numel - begin));
}

// Numbers of a fixed number of bits, one behind the other. The memory has 8 bytes behind them.
class Bits {
 public:
  Bits(std::byte* data, int64_t width) : data_(data), width_(width) {}

  void write(int64_t number, uint64_t value) {
    if (width_ == 0) return;
    uint64_t word = 0;
    std::byte* at = data_ + number * width_ / 8;
    std::memcpy(&word, at, sizeof(word));
    word |= value << (number * width_ % 8);
    std::memcpy(at, &word, sizeof(word));
  }

 private:
  std::byte* data_;
  int64_t width_;
};

uint64_t read_bits(const std::byte* data, int64_t bytes, int64_t width, int64_t number) {
  if (width == 0) return 0;
  const int64_t begin = number * width / 8;
  uint64_t word = 0;
  std::memcpy(&word, data + begin,
              static_cast<size_t>(std::min<int64_t>(sizeof(word), bytes - begin)));
  const uint64_t mask = (uint64_t{1} << width) - 1;
  return (word >> (number * width % 8)) & mask;
}

// The coding of one run at a time.
class Coder {
 public:
  Coder(const SparseFormat& format, const SparseValues& from, std::byte* code)
      : format_(format),
        from_(from),
        code_(code),
        width_(bits_of_number(format)),
        numbers_(static_cast<size_t>(number_bytes() + 8), std::byte{0}) {}

  void run() {
    for_runs(format_, from_.numel, [&](int64_t begin, int64_t numel) { code_run(begin, numel); });
    std::copy_n(numbers_.begin(), number_bytes(), code_ + bytes_of_values(format_, from_.numel));
  }

 private:
  int64_t number_bytes() const {
    return format_.bytes(from_.numel) - bytes_of_values(format_, from_.numel);
  }

  void code_run(int64_t begin, int64_t numel) {
    const int64_t count = sent_of(format_.density, numel);
    const cpu::SparseSums sums = sums_of(begin, numel);
    if (best_sparse_loops().largest(sums) >= kInfinityBits) {
      write_nan(count);
    } else if (from_.threshold != nullptr) {
      take_above(sums, count);
    } else {
      take_largest(sums, count);
    }
    sent_ += count;
    ++runs_;
  }

  cpu::SparseSums sums_of(int64_t begin, int64_t numel) const {
    float* residual = from_.residual ? from_.residual + begin : nullptr;
    return {from_.values + begin, residual, numel, from_.decay};
  }

  // The code of a run with fewer values than there is room for ends with zeros at place 0.
  void take_above(const cpu::SparseSums& sums, int64_t count) {
    places_.resize(static_cast<size_t>(count));
    float* values = reinterpret_cast<float*>(code_) + sent_;
    const int64_t taken = best_sparse_loops().take_large(sums, threshold(sums, count),
                                                         {values, places_.data(), count});
    std::fill(values + taken, values + count, 0.0F);
    for (size_t i = 0; i < static_cast<size_t>(taken); ++i) write_number(i, places_[i]);
  }

  void take_largest(const cpu::SparseSums& sums, int64_t count) {
    sums_.resize(static_cast<size_t>(sums.numel));
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] = sum_at(sums, static_cast<int64_t>(i));
    pick_largest(count);
    has_sizes(format_) ? write_sizes() : write_values();
    if (sums.residual) std::copy(sums_.begin(), sums_.end(), sums.residual);
  }

  static float sum_at(const cpu::SparseSums& from, int64_t i) {
    return from.values[i] + (from.residual ? from.decay * from.residual[i] : 0.0F);
  }

  void write_values() {
    auto* values = reinterpret_cast<float*>(code_) + sent_;
    for (size_t i = 0; i < picked_.size(); ++i) {
      values[i] = std::exchange(sums_[picked_[i]], 0.0F);
      write_number(i, picked_[i]);
    }
  }

  void write_sizes() {
    const auto [small, large] = sizes_of_picked();
    write(Sizes{cpu::to_half(small), cpu::to_half(large)});
    for (size_t i = 0; i < picked_.size(); ++i) {
      float& sum = sums_[picked_[i]];
      const bool is_large = std::abs(sum) >= mean_, is_negative = std::signbit(sum);
      write_number(i, picked_[i] * 4 + (is_large ? 2U : 0U) + (is_negative ? 1U : 0U));
      sum -= std::copysign(is_large ? large : small, sum);
    }
  }

  // Returns what fp16 makes of the means of the smaller sizes and of the larger ones.
  std::pair<float, float> sizes_of_picked() {
    double all = 0, large = 0;
    int64_t count = 0;
    for (const size_t place : picked_) all += std::abs(sums_[place]);
    mean_ = all / static_cast<double>(picked_.size());
    for (const size_t place : picked_) {
      if (std::abs(sums_[place]) < mean_) continue;
      large += std::abs(sums_[place]);
      ++count;
    }
    const auto rest = static_cast<double>(static_cast<int64_t>(picked_.size()) - count);
    return {as_half(rest > 0 ? (all - large) / rest : 0),
            as_half(count > 0 ? large / static_cast<double>(count) : 0)};
  }

  // What is too large for fp16 stays in the residual.
  static float as_half(double size) {
    constexpr double kMost = 65504;
    return cpu::to_float(cpu::to_half(static_cast<float>(std::min(size, kMost))));
  }

  void write_nan(int64_t count) {
    if (has_sizes(format_)) return write(Sizes{cpu::to_half(kNan), cpu::to_half(kNan)});
    auto* values = reinterpret_cast<float*>(code_) + sent_;
    std::fill_n(values, count, 0.0F);
    values[0] = kNan;
  }

  void write(const Sizes& sizes) {
    std::memcpy(code_ + runs_ * static_cast<int64_t>(sizeof(sizes)), &sizes, sizeof(sizes));
  }
  void write_number(size_t index, uint64_t number) {
    Bits(numbers_.data(), width_).write(sent_ + static_cast<int64_t>(index), number);
  }

  void pick_largest(int64_t count) {
    picked_.clear();
    sizes_.resize(sums_.size());
    for (size_t i = 0; i < sums_.size(); ++i) sizes_[i] = std::abs(sums_[i]);
    std::nth_element(sizes_.begin(), sizes_.begin() + (count - 1), sizes_.end(), std::greater<>());
    const float least = sizes_[static_cast<size_t>(count - 1)];
    int64_t equal = count;
    for (size_t i = 0; i < sums_.size(); ++i) equal -= std::abs(sums_[i]) > least ? 1 : 0;
    for (size_t i = 0; i < sums_.size(); ++i) {
      const float size = std::abs(sums_[i]);
      if (size > least || (size == least && equal-- > 0)) picked_.push_back(i);
    }
  }

  // Returns the size above which a sample has as many values as are to be sent.
  float threshold(const cpu::SparseSums& sums, int64_t count) {
    const int64_t numel = sums.numel;
    const double density = static_cast<double>(count) / static_cast<double>(numel);
    const auto wanted = static_cast<int64_t>(kSampled / density);
    const int64_t sample = std::clamp<int64_t>(wanted, kLeastSample, numel / 2);
    const int64_t stride = (numel / sample) | 1;  // odd: no column of a matrix of 2^n
    sizes_.resize(static_cast<size_t>(sample));
    auto place = static_cast<int64_t>(from_.draw % static_cast<uint32_t>(numel));
    for (float& size : sizes_) {
      size = std::abs(sum_at(sums, place));
      place = (place + stride) % numel;
    }
    const auto nth = static_cast<int64_t>(density * static_cast<double>(sample));
    std::nth_element(sizes_.begin(), sizes_.begin() + nth, sizes_.end(), std::greater<>());
    const float sampled = sizes_[static_cast<size_t>(nth)];
    float& kept = *from_.threshold;
    const bool is_near = kept > 0.5F * sampled && kept < 2 * sampled;
    kept = is_near ? std::sqrt(kept * sampled) : sampled;
    return kept;
  }

  static constexpr double kSampled = 128;  // values above the threshold in a sample
  static constexpr int64_t kLeastSample = 2048;

  const SparseFormat& format_;
  const SparseValues& from_;
  std::byte* code_;
  int64_t width_;
  std::vector<std::byte> numbers_;
  std::vector<float> sums_;
  std::vector<float> sizes_;
  std::vector<size_t> picked_;    // places of a run that are sent
  std::vector<uint32_t> places_;  // the same, above a threshold
  double mean_ = 0;               // of their sizes
  int64_t sent_ = 0;              // values of the runs before
  int64_t runs_ = 0;
};

[[noreturn]] void refuse_place(int64_t place, int64_t numel) {
  TORCH_CHECK_VALUE(false, error_text("compression",
                                      "got a code with place " + std::to_string(place) + " of " +
                                          std::to_string(numel) + " values",
                                      {}, "Another rank has sent something else than a code."));
}

// A code that is added up, run by run.
class Decoder {
 public:
  Decoder(const SparseFormat& format, const std::byte* code, int64_t numel)
      : format_(format),
        code_(code),
        numbers_(code + bytes_of_values(format, numel)),
        number_bytes_(format.bytes(numel) - bytes_of_values(format, numel)),
        width_(bits_of_number(format)) {}

  void add_run(float* to, int64_t numel) {
    const Sizes sizes = has_sizes(format_) ? at<Sizes>(runs_++) : Sizes{};
    const float values[] = {cpu::to_float(sizes.small), cpu::to_float(sizes.large)};
    for (const int64_t end = sent_ + sent_of(format_.density, numel); sent_ < end; ++sent_) {
      uint64_t number = read_bits(numbers_, number_bytes_, width_, sent_);
      float value = 0;
      if (has_sizes(format_)) {
        value = (number & 1) != 0 ? -values[number >> 1 & 1] : values[number >> 1 & 1];
        number >>= 2;
      } else {
        value = at<float>(sent_);
      }
      const auto place = static_cast<int64_t>(number);
      if (place >= numel) refuse_place(place, numel);
      to[place] += value;
    }
  }

 private:
  template <typename T>
  T at(int64_t index) const {
    T value;
    std::memcpy(&value, code_ + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }

  const SparseFormat& format_;
  const std::byte* code_;
  const std::byte* numbers_;
  int64_t number_bytes_;
  int64_t width_;
  int64_t sent_ = 0;
  int64_t runs_ = 0;
};

void add_code(const SparseFormat& format, const std::byte* code, float* to, int64_t numel) {
  Decoder decoder(format, code, numel);
  for_runs(format, numel,
           [&](int64_t begin, int64_t length) { decoder.add_run(to + begin, length); });
}

}  // namespace

int64_t sent_of(double density, int64_t numel) {
  return std::min(numel, static_cast<int64_t>(std::ceil(density * static_cast<double>(numel))));
}

int64_t SparseFormat::count(int64_t numel) const {
  if (chunk == 0) return sent_of(density, numel);
  const int64_t whole = numel / chunk;
  return whole * sent_of(density, chunk) + sent_of(density, numel - whole * chunk);
}

int64_t SparseFormat::bytes(int64_t numel) const {
  return bytes_of_values(*this, numel) + (count(numel) * bits_of_number(*this) + 7) / 8;
}

void encode(const SparseFormat& format, const SparseValues& from, std::byte* code) {
  if (from.numel > 0) Coder(format, from, code).run();
}

void decode(const SparseFormat& format, std::span<const std::byte* const> codes, float* to,
            int64_t numel, float factor) {
  std::fill_n(to, numel, 0.0F);
  for (const std::byte* code : codes) add_code(format, code, to, numel);
  for (int64_t i = 0; i < numel; ++i) to[i] *= factor;
}

}  // namespace trireme
