#include <trireme/grad/codes/reduced_codes.h>

#include <trireme/kernels/cast_codes.h>
#include <trireme/kernels/random_bits.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace trireme {
namespace {

// Codes that engines can sum up, and dense gradients beside them.
class ReducedCodes : public InFlight {
 public:
  ReducedCodes(at::ScalarType dtype, CodeExchange exchange)
      : InFlight(std::move(exchange)), dtype_(dtype) {}

  int64_t start() override {
    int64_t numel = 0;
    for (const CodedGradient& gradient : exchange_.gradients)
      if (!gradient.is_dense) numel += code_numel(gradient);
    codes_ = take_memory(numel, dtype_);
    each([&](const CodedGradient& gradient, Span code) { encode_to(code, gradient); });
    dense_ = packed_dense();
    const int64_t sent = reduce(codes_);
    return sent + reduce(dense_);
  }

 protected:
  virtual int64_t code_numel(const CodedGradient& gradient) const { return gradient.numel; }
  // Writes what this sender adds to the mean, and what it takes out of the residual.
  virtual void encode_to(Span code, const CodedGradient& gradient) const = 0;
  virtual void decode_from(Span code, const CodedGradient& gradient) const = 0;

 private:
  template <typename Visit>
  void each(const Visit& visit) const {
    int64_t begin = 0;
    for (const CodedGradient& gradient : exchange_.gradients) {
      if (gradient.is_dense) continue;
      const int64_t end = begin + code_numel(gradient);
      visit(gradient, slice(span_of(codes_), begin, end));
      begin = end;
    }
  }

  void finish() override {
    codes_ = codes_.cpu();
    each([&](const CodedGradient& gradient, Span code) { decode_from(code, gradient); });
    unpack_dense(dense_);
    codes_.reset();
    dense_.reset();
  }

  at::ScalarType dtype_;
  at::Tensor codes_;
  at::Tensor dense_;
};

class Casts final : public ReducedCodes {
 public:
  using ReducedCodes::ReducedCodes;

 private:
  void encode_to(Span code, const CodedGradient& gradient) const override {
    encode(CastValues{gradient.values, residual_of(gradient)}, code, exchange_.factor);
  }
  void decode_from(Span code, const CodedGradient& gradient) const override {
    scaled_copy(values_of(gradient), code, 1);
  }
};

// Values at one position drawn in each of as many equal parts of a parameter.
class DrawnValues final : public ReducedCodes {
 public:
  DrawnValues(const RandomK& method, CodeExchange exchange)
      : ReducedCodes(at::kFloat, std::move(exchange)), method_(method) {}

 private:
  int64_t code_numel(const CodedGradient& gradient) const override {
    return sent_of(method_.density, gradient.numel);
  }

  template <typename Visit>
  void at_positions(const CodedGradient& gradient, const Visit& visit) const {
    const int64_t count = code_numel(gradient);
    const uint32_t seed = random_bits(gradient.draw, static_cast<uint32_t>(method_.seed));
    for (int64_t k = 0; k < count; ++k) {
      const int64_t begin = k * gradient.numel / count;
      const int64_t end = (k + 1) * gradient.numel / count;
      const uint64_t drawn = random_bits(seed, static_cast<uint32_t>(k));
      visit(k, begin + static_cast<int64_t>((drawn * static_cast<uint64_t>(end - begin)) >> 32));
    }
  }

  void encode_to(Span code, const CodedGradient& gradient) const override {
    float* residual = residual_of(gradient);
    auto* to = static_cast<float*>(code.data);
    const double density = static_cast<double>(code.numel) / static_cast<double>(gradient.numel);
    const double factor = residual ? exchange_.factor : exchange_.factor / density;
    if (residual && !add_to(residual, gradient)) {  // no finite sum: the residual stays
      std::fill_n(to, code.numel, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    float* sums = residual ? residual : gradient.values;
    at_positions(gradient, [&](int64_t k, int64_t place) {
      to[k] = sums[place] * static_cast<float>(factor);
      if (residual) sums[place] = 0;
    });
  }

  // Adds the values to the residual, if all sums are finite.
  static bool add_to(float* residual, const CodedGradient& gradient) {
    bool is_finite = true;
    for (int64_t i = 0; i < gradient.numel; ++i)
      is_finite = is_finite && std::isfinite(gradient.values[i] + residual[i]);
    for (int64_t i = 0; is_finite && i < gradient.numel; ++i) residual[i] += gradient.values[i];
    return is_finite;
  }

  void decode_from(Span code, const CodedGradient& gradient) const override {
    const auto* from = static_cast<const float*>(code.data);
    std::fill_n(gradient.values, gradient.numel, 0.0F);
    at_positions(gradient, [&](int64_t k, int64_t place) { gradient.values[place] = from[k]; });
  }

  RandomK method_;
};

}  // namespace

std::unique_ptr<InFlight> make_casts(at::ScalarType dtype, CodeExchange exchange) {
  return std::make_unique<Casts>(dtype, std::move(exchange));
}

std::unique_ptr<InFlight> make_drawn_values(const RandomK& method, CodeExchange exchange) {
  return std::make_unique<DrawnValues>(method, std::move(exchange));
}

}  // namespace trireme
