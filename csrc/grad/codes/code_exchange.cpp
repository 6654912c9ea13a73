#include <trireme/grad/codes/code_exchange.h>

#include <trireme/kernels/span.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kAligned = sizeof(float);

int64_t aligned(int64_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

// What both kinds of exchange do: pass on questions, and finish once.
class InFlight : public Pending::State {
 public:
  explicit InFlight(CodeExchange exchange) : exchange_(std::move(exchange)) {}

  bool done() const override {
    return std::all_of(verbs_.begin(), verbs_.end(),
                       [](const Pending& verb) { return verb.done(); });
  }
  void wait() override {
    for (Pending& verb : verbs_) verb.wait();
    if (!std::exchange(is_finished_, true)) finish();
  }
  std::optional<Pending::Clock::time_point> finished_at() const override {
    return verbs_.empty() ? std::nullopt : verbs_.back().finished_at();
  }

  const CodeExchange& exchange() const { return exchange_; }

 protected:
  // Writes the means.
  virtual void finish() = 0;

  CodeExchange exchange_;
  std::vector<Pending> verbs_;

 private:
  bool is_finished_ = false;
};

class BlockCodes final : public InFlight {
 public:
  BlockCodes(const BlockFormat& format, CodeExchange exchange)
      : InFlight(std::move(exchange)), format_(format) {
    for (const CodedGradient& gradient : exchange_.gradients) bytes_ += aligned(bytes_of(gradient));
  }

  int64_t start() {
    const int64_t world = exchange_.senders->world();
    if (bytes_ == 0) return 0;
    const at::Tensor own = at::empty({bytes_}, at::kByte);
    write(static_cast<std::byte*>(own.data_ptr()));
    const c10::Device device = exchange_.senders->device();
    all_ = at::empty({world * bytes_}, own.options().device(device));
    verbs_.push_back(exchange_.senders->all_gather({all_}, {own.to(device)}, exchange_.label));
    return (world - 1) * bytes_;
  }

 private:
  int64_t bytes_of(const CodedGradient& gradient) const {
    return gradient.is_dense ? gradient.numel * kAligned : code_bytes(format_, gradient.numel);
  }

  void write(std::byte* to) const {
    for (const CodedGradient& gradient : exchange_.gradients) {
      float* residual = gradient.residual.defined() ? gradient.residual.data_ptr<float>() : nullptr;
      if (gradient.is_dense) {
        std::memcpy(to, gradient.values, static_cast<size_t>(bytes_of(gradient)));
      } else {
        encode(format_,
               {gradient.values, residual, gradient.numel, gradient.dither, gradient.first}, to);
      }
      to += aligned(bytes_of(gradient));
    }
  }

  void finish() override {
    if (bytes_ == 0) return;
    all_ = all_.cpu();
    const auto* data = static_cast<const std::byte*>(all_.data_ptr());
    std::vector<const std::byte*> codes;
    for (int64_t sender = 0; sender < exchange_.senders->world(); ++sender)
      codes.push_back(data + sender * bytes_);
    const auto factor = static_cast<float>(exchange_.factor);
    for (const CodedGradient& gradient : exchange_.gradients) {
      if (gradient.is_dense) {
        add_up(codes, gradient, factor);
      } else {
        decode(format_, codes, gradient.values, gradient.numel, factor);
      }
      for (const std::byte*& code : codes) code += aligned(bytes_of(gradient));
    }
    all_.reset();
  }

  static void add_up(const std::vector<const std::byte*>& codes, const CodedGradient& gradient,
                     float factor) {
    float* sum = gradient.values;
    std::fill_n(sum, gradient.numel, 0.0F);
    for (const std::byte* code : codes) {
      const auto* values = reinterpret_cast<const float*>(code);
      for (int64_t i = 0; i < gradient.numel; ++i) sum[i] += values[i];
    }
    for (int64_t i = 0; i < gradient.numel; ++i) sum[i] *= factor;
  }

  BlockFormat format_;
  int64_t bytes_ = 0;  // of one sender
  at::Tensor all_;
};

class Casts final : public InFlight {
 public:
  Casts(at::ScalarType dtype, CodeExchange exchange) : InFlight(std::move(exchange)) {
    for (const CodedGradient& gradient : exchange_.gradients)
      (gradient.is_dense ? dense_numel_ : cast_numel_) += gradient.numel;
    cast_ = at::empty({cast_numel_}, dtype);
    dense_ = at::empty({dense_numel_}, at::kFloat);
  }

  int64_t start() {
    each([&](const CodedGradient& gradient, Span to) {
      if (gradient.residual.defined()) {
        cast_with_residual(gradient, to);
      } else {
        scaled_copy(to, values_of(gradient), exchange_.factor);
      }
    });
    start_to_reduce(cast_);
    start_to_reduce(dense_);
    return static_cast<int64_t>(cast_.nbytes() + dense_.nbytes());
  }

 private:
  static Span values_of(const CodedGradient& gradient) {
    return {gradient.values, at::kFloat, gradient.numel};
  }

  // Calls visit(gradient, where it travels).
  template <typename Visit>
  void each(const Visit& visit) const {
    int64_t cast = 0;
    int64_t dense = 0;
    for (const CodedGradient& gradient : exchange_.gradients) {
      int64_t& begin = gradient.is_dense ? dense : cast;
      const Span all = span_of(gradient.is_dense ? dense_ : cast_);
      visit(gradient, slice(all, begin, begin + gradient.numel));
      begin += gradient.numel;
    }
  }

  void start_to_reduce(at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    tensor = tensor.to(exchange_.senders->device());
    verbs_.push_back(exchange_.senders->all_reduce({tensor}, ReduceOp::kSum, exchange_.label));
  }

  void cast_with_residual(const CodedGradient& gradient, Span to) const {
    constexpr int64_t kPiece = 512;
    float sums[kPiece];
    float decoded[kPiece];
    auto* residual = gradient.residual.data_ptr<float>();
    for (int64_t begin = 0; begin < gradient.numel; begin += kPiece) {
      const int64_t count = std::min(kPiece, gradient.numel - begin);
      for (int64_t i = 0; i < count; ++i)
        sums[i] = gradient.values[begin + i] + residual[begin + i];
      const Span code = slice(to, begin, begin + count);
      scaled_copy(code, {sums, at::kFloat, count}, exchange_.factor);
      scaled_copy({decoded, at::kFloat, count}, code, 1 / exchange_.factor);
      for (int64_t i = 0; i < count; ++i)
        if (std::isfinite(decoded[i])) residual[begin + i] = sums[i] - decoded[i];
    }
  }

  void finish() override {
    cast_ = cast_.cpu();
    dense_ = dense_.cpu();
    each([](const CodedGradient& gradient, Span from) {
      scaled_copy(values_of(gradient), from, 1);
    });
    cast_.reset();
    dense_.reset();
  }

  int64_t cast_numel_ = 0;
  int64_t dense_numel_ = 0;
  at::Tensor cast_;
  at::Tensor dense_;
};

// Scales what goes on.
void scale_inputs(const CodeExchange& exchange) {
  if (exchange.input_scale == 1) return;
  for (const CodedGradient& gradient : exchange.gradients) {
    const Span values{gradient.values, at::kFloat, gradient.numel};
    scaled_copy(values, values, exchange.input_scale);
  }
}

template <typename State>
CodesInFlight launched(std::unique_ptr<State> state) {
  scale_inputs(state->exchange());
  const int64_t sent = state->start();
  return {Pending(std::move(state)), sent};
}

}  // namespace

CodesInFlight gather_block_codes(const BlockFormat& format, CodeExchange exchange) {
  return launched(std::make_unique<BlockCodes>(format, std::move(exchange)));
}

CodesInFlight reduce_casts(at::ScalarType dtype, CodeExchange exchange) {
  return launched(std::make_unique<Casts>(dtype, std::move(exchange)));
}

}  // namespace trireme
