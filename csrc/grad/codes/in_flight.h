#pragma once

#include <trireme/grad/codes/code_exchange.h>
#include <trireme/kernels/span.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace trireme {

// What all exchanges do: pass on questions, and finish once.
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

  // Codes, and starts. Returns the bytes that go to others.
  virtual int64_t start() = 0;

 protected:
  // Writes the means.
  virtual void finish() = 0;

  static Span values_of(const CodedGradient& gradient) {
    return {gradient.values, at::kFloat, gradient.numel};
  }
  static float* residual_of(const CodedGradient& gradient) {
    const at::Tensor& residual = gradient.kept->residual;
    return residual.defined() ? residual.data_ptr<float>() : nullptr;
  }
  // Starts to sum `tensor` up, which may be replaced by one on the senders' device. Returns its
  // bytes.
  int64_t reduce(at::Tensor& tensor) {
    if (tensor.numel() == 0) return 0;
    tensor = tensor.to(exchange_.senders->device());
    verbs_.push_back(exchange_.senders->all_reduce({tensor}, ReduceOp::kSum, exchange_.label));
    return static_cast<int64_t>(tensor.nbytes());
  }

  CodeExchange exchange_;
  std::vector<Pending> verbs_;

 private:
  bool is_finished_ = false;
};

// The gradients of an exchange that go as fp32, one behind the other.
class DenseGradients {
 public:
  // Returns all of them times the factor.
  static at::Tensor of(const CodeExchange& exchange) {
    int64_t numel = 0;
    for (const CodedGradient& gradient : exchange.gradients)
      if (gradient.is_dense) numel += gradient.numel;
    at::Tensor dense = at::empty({numel}, at::kFloat);
    each(exchange, dense,
         [&](Span values, Span packed) { scaled_copy(packed, values, exchange.factor); });
    return dense;
  }
  static void unpack(const CodeExchange& exchange, const at::Tensor& dense) {
    each(exchange, dense, [](Span values, Span packed) { scaled_copy(values, packed, 1); });
  }

 private:
  template <typename Visit>
  static void each(const CodeExchange& exchange, const at::Tensor& dense, const Visit& visit) {
    int64_t begin = 0;
    for (const CodedGradient& gradient : exchange.gradients) {
      if (!gradient.is_dense) continue;
      visit(Span{gradient.values, at::kFloat, gradient.numel},
            slice(span_of(dense), begin, begin + gradient.numel));
      begin += gradient.numel;
    }
  }
};

}  // namespace trireme
