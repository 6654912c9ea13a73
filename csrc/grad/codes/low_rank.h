#pragma once

#include <trireme/grad/codes/in_flight.h>

#include <memory>
#include <vector>

namespace trireme {

// Gradients as products of two matrices of a low rank, in two journeys; see PowerSGD.
class LowRank final : public InFlight {
 public:
  LowRank(const PowerSGD& method, CodeExchange exchange)
      : InFlight(std::move(exchange)), method_(method) {}

  int64_t start() override;
  // Waits for P, and starts the journey of Q.
  void go_on();
  // Not before the second journey has begun.
  bool done() const override { return has_gone_on_ && InFlight::done(); }
  void wait() override {
    go_on();
    InFlight::wait();
  }

 private:
  struct Matrix {
    const CodedGradient* gradient;
    at::Tensor sum;  // gradient and residual, where the gradient was
    at::Tensor left;
    at::Tensor right;
  };
  at::Tensor basis_of(const CodedGradient& gradient) const;
  void finish() override;

  PowerSGD method_;
  std::vector<Matrix> matrices_;
  at::Tensor lefts_;
  at::Tensor rights_;
  at::Tensor dense_;
  at::Tensor moved_;  // what is on its way, on the senders' device
  bool has_gone_on_ = false;
};

}  // namespace trireme
