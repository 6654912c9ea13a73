#include <trireme/grad/codes/gathered_codes.h>

#include <trireme/kernels/cast_codes.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace trireme {
namespace {

constexpr int64_t kAligned = sizeof(float);

int64_t aligned(int64_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

// Codes that all senders send to all.
class GatheredCodes : public InFlight {
 public:
  using InFlight::InFlight;

  int64_t start() override {
    for (const CodedGradient& gradient : exchange_.gradients) bytes_ += aligned(bytes_of(gradient));
    if (bytes_ == 0) return 0;
    const int64_t world = exchange_.senders->world();
    const at::Tensor own = take_memory(bytes_, at::kByte);
    write(static_cast<std::byte*>(own.data_ptr()));
    const c10::Device device = exchange_.senders->device();
    all_ = device.is_cpu() ? take_memory(world * bytes_, at::kByte)
                           : at::empty({world * bytes_}, own.options().device(device));
    verbs_.push_back(exchange_.senders->all_gather({all_}, {own.to(device)}, exchange_.label));
    return (world - 1) * bytes_;
  }

 protected:
  using Codes = std::vector<const std::byte*>;

  virtual int64_t code_bytes_of(const CodedGradient& gradient) const = 0;
  virtual void encode_to(std::byte* code, const CodedGradient& gradient) const = 0;
  virtual void decode_from(const Codes& codes, const CodedGradient& gradient) const = 0;
  float factor() const { return static_cast<float>(exchange_.factor); }

 private:
  int64_t bytes_of(const CodedGradient& gradient) const {
    return gradient.is_dense ? gradient.numel * kAligned : code_bytes_of(gradient);
  }

  void write(std::byte* to) const {
    for (const CodedGradient& gradient : exchange_.gradients) {
      if (gradient.is_dense) {
        std::memcpy(to, gradient.values, static_cast<size_t>(bytes_of(gradient)));
      } else {
        encode_to(to, gradient);
      }
      to += aligned(bytes_of(gradient));
    }
  }

  void finish() override {
    if (bytes_ == 0) return;
    all_ = all_.cpu();
    const auto* data = static_cast<const std::byte*>(all_.data_ptr());
    Codes codes;
    for (int64_t sender = 0; sender < exchange_.senders->world(); ++sender)
      codes.push_back(data + sender * bytes_);
    for (const CodedGradient& gradient : exchange_.gradients) {
      if (gradient.is_dense) {
        add_up(codes, gradient);
      } else {
        decode_from(codes, gradient);
      }
      for (const std::byte*& code : codes) code += aligned(bytes_of(gradient));
    }
    all_.reset();
  }

  void add_up(const Codes& codes, const CodedGradient& gradient) const {
    float* sum = gradient.values;
    std::fill_n(sum, gradient.numel, 0.0F);
    for (const std::byte* code : codes) {
      const auto* values = reinterpret_cast<const float*>(code);
      for (int64_t i = 0; i < gradient.numel; ++i) sum[i] += values[i];
    }
    for (int64_t i = 0; i < gradient.numel; ++i) sum[i] *= factor();
  }

  int64_t bytes_ = 0;  // of one sender
  at::Tensor all_;
};

class BlockCodes final : public GatheredCodes {
 public:
  BlockCodes(const BlockFormat& format, bool has_dither, CodeExchange exchange)
      : GatheredCodes(std::move(exchange)), format_(format), has_dither_(has_dither) {}

 private:
  int64_t code_bytes_of(const CodedGradient& gradient) const override {
    return code_bytes(format_, gradient.numel);
  }
  void encode_to(std::byte* code, const CodedGradient& gradient) const override {
    BlockValues values{gradient.values, residual_of(gradient), gradient.numel};
    values.first = gradient.first;
    if (has_dither_)  // senders draw apart from each other
      values.dither = gradient.draw ^ static_cast<uint32_t>(exchange_.senders->rank() * 0x9e3779b9);
    encode(format_, values, code);
  }
  void decode_from(const Codes& codes, const CodedGradient& gradient) const override {
    decode(format_, codes, gradient.values, gradient.numel, factor());
  }

  BlockFormat format_;
  bool has_dither_;
};

// Rounded values of two senders. An engine would round their sum again, and many sum 16 bits up one
// by one.
class CastCodes final : public GatheredCodes {
 public:
  CastCodes(at::ScalarType dtype, CodeExchange exchange)
      : GatheredCodes(std::move(exchange)), dtype_(dtype) {}

 private:
  int64_t code_bytes_of(const CodedGradient& gradient) const override {
    return gradient.numel * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  void encode_to(std::byte* code, const CodedGradient& gradient) const override {
    encode(CastValues{gradient.values, residual_of(gradient)}, {code, dtype_, gradient.numel},
           /*factor=*/1);
  }
  void decode_from(const Codes& codes, const CodedGradient& gradient) const override {
    std::vector<ConstSpan> spans;
    for (const std::byte* code : codes) spans.push_back({code, dtype_, gradient.numel});
    decode(spans, values_of(gradient), exchange_.factor);
  }

  at::ScalarType dtype_;
};

class SparseCodes final : public GatheredCodes {
 public:
  SparseCodes(const TopK& method, CodeExchange exchange)
      : GatheredCodes(std::move(exchange)), method_(method), format_(sparse_format(method)) {}

 private:
  int64_t code_bytes_of(const CodedGradient& gradient) const override {
    return format_.bytes(gradient.numel);
  }
  void encode_to(std::byte* code, const CodedGradient& gradient) const override {
    SparseValues values{gradient.values, residual_of(gradient), gradient.numel};
    values.decay = static_cast<float>(method_.decay);
    values.draw = gradient.draw;
    if (has_threshold(method_, gradient.numel)) values.threshold = &gradient.kept->threshold;
    encode(format_, values, code);
  }
  void decode_from(const Codes& codes, const CodedGradient& gradient) const override {
    decode(format_, codes, gradient.values, gradient.numel, factor());
  }

  TopK method_;
  SparseFormat format_;
};

}  // namespace

std::unique_ptr<InFlight> make_block_codes(const BlockFormat& format, bool has_dither,
                                           CodeExchange exchange) {
  return std::make_unique<BlockCodes>(format, has_dither, std::move(exchange));
}

std::unique_ptr<InFlight> make_cast_codes(at::ScalarType dtype, CodeExchange exchange) {
  return std::make_unique<CastCodes>(dtype, std::move(exchange));
}

std::unique_ptr<InFlight> make_sparse_codes(const TopK& method, CodeExchange exchange) {
  return std::make_unique<SparseCodes>(method, std::move(exchange));
}

}  // namespace trireme
