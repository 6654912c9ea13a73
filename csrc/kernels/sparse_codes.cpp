#include <trireme/kernels/sparse_codes.h>

#include <trireme/common/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace trireme {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kPlaceBits = 32;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int64_t bits_of_place(const SparseFormat& format) {
  if (format.chunk == 0) return kPlaceBits;
  return std::bit_width(static_cast<uint64_t>(format.chunk)) - 1;
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

  void write(int64_t number, uint32_t value) {
    if (width_ == 0) return;
    uint64_t word = 0;
    std::byte* at = data_ + number * width_ / 8;
    std::memcpy(&word, at, sizeof(word));
    word |= static_cast<uint64_t>(value) << (number * width_ % 8);
    std::memcpy(at, &word, sizeof(word));
  }

 private:
  std::byte* data_;
  int64_t width_;
};

uint32_t read_bits(const std::byte* data, int64_t bytes, int64_t width, int64_t number) {
  if (width == 0) return 0;
  const int64_t begin = number * width / 8;
  uint64_t word = 0;
  std::memcpy(&word, data + begin,
              static_cast<size_t>(std::min<int64_t>(sizeof(word), bytes - begin)));
  const uint64_t mask = (uint64_t{1} << width) - 1;
  return static_cast<uint32_t>((word >> (number * width % 8)) & mask);
}

// The coding of one run at a time.
class Coder {
 public:
  Coder(const SparseFormat& format, const SparseValues& from, std::byte* code)
      : format_(format),
        from_(from),
        values_(reinterpret_cast<float*>(code)),
        code_(code),
        width_(bits_of_place(format)),
        places_(static_cast<size_t>(place_bytes() + 8), std::byte{0}) {}

  void run() {
    for_runs(format_, from_.numel, [&](int64_t begin, int64_t numel) { code_run(begin, numel); });
    std::copy_n(places_.begin(), place_bytes(), code_ + format_.count(from_.numel) * kFloatBytes);
  }

 private:
  int64_t place_bytes() const {
    return format_.bytes(from_.numel) - format_.count(from_.numel) * kFloatBytes;
  }

  void code_run(int64_t begin, int64_t numel) {
    sums_.resize(static_cast<size_t>(numel));
    bool is_finite = true;
    for (int64_t i = 0; i < numel; ++i) {
      const float kept = from_.residual ? from_.decay * from_.residual[begin + i] : 0.0F;
      sums_[static_cast<size_t>(i)] = from_.values[begin + i] + kept;
    }
    for (const float sum : sums_) is_finite = is_finite && std::isfinite(sum);
    const int64_t count = sent_of(format_.density, numel);
    const int64_t end = sent_ + count;
    if (!is_finite) {
      send(0, kNan);
    } else {
      if (from_.threshold != nullptr) {
        send_above(threshold(count), count);
      } else {
        send_largest(count);
      }
      if (from_.residual) std::copy(sums_.begin(), sums_.end(), from_.residual + begin);
    }
    for (; sent_ < end; ++sent_) values_[sent_] = 0;  // nothing more: zeros at place 0
  }

  void send(int64_t place, float value) {
    values_[sent_] = value;
    Bits(places_.data(), width_).write(sent_, static_cast<uint32_t>(place));
    ++sent_;
  }
  void take(size_t place) {
    send(static_cast<int64_t>(place), sums_[place]);
    sums_[place] = 0;
  }

  void send_largest(int64_t count) {
    sizes_.resize(sums_.size());
    for (size_t i = 0; i < sums_.size(); ++i) sizes_[i] = std::abs(sums_[i]);
    std::nth_element(sizes_.begin(), sizes_.begin() + (count - 1), sizes_.end(), std::greater<>());
    const float least = sizes_[static_cast<size_t>(count - 1)];
    int64_t equal = count;
    for (size_t i = 0; i < sums_.size(); ++i) equal -= std::abs(sums_[i]) > least ? 1 : 0;
    for (size_t i = 0; i < sums_.size(); ++i) {
      const float size = std::abs(sums_[i]);
      if (size > least || (size == least && equal-- > 0)) take(i);
    }
  }

  void send_above(float least, int64_t count) {
    for (size_t i = 0; i < sums_.size() && count > 0; ++i) {
      if (std::abs(sums_[i]) < least || sums_[i] == 0) continue;
      take(i);
      --count;
    }
  }

  // Returns the size above which a sample has as many values as are to be sent.
  float threshold(int64_t count) {
    const auto numel = static_cast<int64_t>(sums_.size());
    const double density = static_cast<double>(count) / static_cast<double>(numel);
    const auto wanted = static_cast<int64_t>(kSampled / density);
    const int64_t sample = std::clamp<int64_t>(wanted, kLeastSample, numel / 2);
    const int64_t stride = (numel / sample) | 1;  // odd: no column of a matrix of 2^n
    sizes_.resize(static_cast<size_t>(sample));
    auto place = static_cast<int64_t>(from_.draw % static_cast<uint32_t>(numel));
    for (float& size : sizes_) {
      size = std::abs(sums_[static_cast<size_t>(place)]);
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
  float* values_;
  std::byte* code_;
  int64_t width_;
  std::vector<std::byte> places_;
  std::vector<float> sums_;
  std::vector<float> sizes_;
  int64_t sent_ = 0;
};

[[noreturn]] void refuse_place(int64_t place, int64_t numel) {
  TORCH_CHECK_VALUE(false, error_text("compression",
                                      "got a code with place " + std::to_string(place) + " of " +
                                          std::to_string(numel) + " values",
                                      {}, "Another rank has sent something else than a code."));
}

void add_code(const SparseFormat& format, const std::byte* code, float* to, int64_t numel) {
  const int64_t count = format.count(numel);
  const int64_t place_bytes = format.bytes(numel) - count * kFloatBytes;
  const int64_t width = bits_of_place(format);
  int64_t number = 0;
  for_runs(format, numel, [&](int64_t begin, int64_t length) {
    for (const int64_t end = number + sent_of(format.density, length); number < end; ++number) {
      float value = 0;
      std::memcpy(&value, code + number * kFloatBytes, sizeof(value));
      const int64_t place = read_bits(code + count * kFloatBytes, place_bytes, width, number);
      if (place >= length) refuse_place(place, length);
      to[begin + place] += value;
    }
  });
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
  return count(numel) * kFloatBytes + (count(numel) * bits_of_place(*this) + 7) / 8;
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
