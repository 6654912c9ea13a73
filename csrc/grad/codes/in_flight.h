#pragma once

#include <trireme/grad/codes/code_exchange.h>
#include <trireme/kernels/span.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

// What all exchanges do: pass on questions, and finish once.
class InFlight : public Pending::State {
 public:
  explicit InFlight(CodeExchange exchange);

  bool done() const override;
  void wait() override;
  std::optional<Pending::Clock::time_point> finished_at() const override;

  // Codes, and starts. Returns the bytes that go to others.
  virtual int64_t start() = 0;

 protected:
  // Writes the means.
  virtual void finish() = 0;

  static Span values_of(const CodedGradient& gradient) {
    return {gradient.values, at::kFloat, gradient.numel};
  }
  // Returns null without error feedback.
  static float* residual_of(const CodedGradient& gradient);
  // Returns memory on the CPU for codes.
  at::Tensor take_memory(int64_t numel, at::ScalarType dtype) const;
  // Starts to sum `tensor` up, which may be replaced by one on the senders' device. Returns its
  // bytes.
  int64_t reduce(at::Tensor& tensor);

  // The gradients that go as fp32, one behind the other: packed times the factor, and unpacked.
  at::Tensor packed_dense() const;
  void unpack_dense(const at::Tensor& packed) const;

  CodeExchange exchange_;
  std::vector<Pending> verbs_;

 private:
  bool is_finished_ = false;
};

}  // namespace trireme
