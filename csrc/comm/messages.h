#pragma once

#include <trireme/comm/pending.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <vector>

namespace trireme {

// The messages to or from one rank, in the order in which they were issued.
class Messages : public Pending::State {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Issues one message, a contiguous tensor with elements.
  using Issue = std::function<WorkPtr(const at::Tensor& moved)>;

  void send(const std::vector<at::Tensor>& tensors, const Issue& issue);
  // Fills a tensor that is not contiguous when it is waited for.
  void recv(const std::vector<at::Tensor>& tensors, const Issue& issue);

  bool done() const override;
  void wait() override { wait_until(Pending::Clock::time_point::max()); }
  bool wait_for(std::chrono::milliseconds patience) override;

 protected:
  // Waits until `deadline`, or to the end if the engine can only do that. Returns whether the
  // message is through; if not, it may be waited for again.
  virtual bool wait_until(c10d::Work& work, bool on_cpu, Pending::Clock::time_point deadline) = 0;

 private:
  bool wait_until(Pending::Clock::time_point deadline);

  struct Message {
    WorkPtr work;
    at::Tensor moved;
    at::Tensor target;  // gets the data received, if they are in other memory
  };
  std::vector<Message> messages_;
  size_t next_ = 0;
};

}  // namespace trireme
