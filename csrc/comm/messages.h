#pragma once

#include <trireme/comm/pending.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

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
  void wait() override;

 protected:
  virtual void wait_for(c10d::Work& work, bool on_cpu) = 0;

 private:
  struct Message {
    WorkPtr work;
    at::Tensor moved;
    at::Tensor target;  // gets the data received, if they are in other memory
  };
  std::vector<Message> messages_;
  size_t next_ = 0;
};

}  // namespace trireme
