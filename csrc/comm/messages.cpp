#include <trireme/comm/messages.h>

#include <trireme/common/duration.h>
#include <trireme/common/resolved.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

void Messages::send(const std::vector<at::Tensor>& tensors, const Issue& issue) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    at::Tensor moved = resolved(tensor).contiguous();
    WorkPtr work = issue(moved);
    messages_.push_back({std::move(work), std::move(moved), {}});
  }
}

void Messages::recv(const std::vector<at::Tensor>& tensors, const Issue& issue) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const bool in_place = lies_plain(tensor);
    at::Tensor moved = in_place ? tensor : at::empty(tensor.sizes(), tensor.options());
    WorkPtr work = issue(moved);
    messages_.push_back({std::move(work), std::move(moved), in_place ? at::Tensor() : tensor});
  }
}

bool Messages::done() const {
  return std::all_of(messages_.begin(), messages_.end(),
                     [](const Message& message) { return message.work->isCompleted(); });
}

bool Messages::wait_for(std::chrono::milliseconds patience) {
  return wait_until(deadline_after(patience));
}

bool Messages::wait_until(Pending::Clock::time_point deadline) {
  for (; next_ < messages_.size(); ++next_) {
    const Message& message = messages_[next_];
    if (!wait_until(*message.work, message.moved.is_cpu(), deadline)) return false;
    if (message.target.defined()) message.target.copy_(message.moved);
  }
  return true;
}

}  // namespace trireme
