#include <trireme/module/backward_error.h>

#include <trireme/common/exception_text.h>

#include <ATen/core/ivalue_inl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>

namespace trireme {
namespace {

// Returns the running backward, found from the only member of it that autograd shows.
const torch::autograd::GraphTask* current_backward() {
  using torch::autograd::GraphTask;
  const auto* visited = torch::autograd::get_current_graph_task_exec_info();
  if (visited == nullptr) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // both compilers lay it out as any other
  constexpr size_t kPlace = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  return reinterpret_cast<const GraphTask*>(reinterpret_cast<const std::byte*>(visited) - kPlace);
}

}  // namespace

BackwardError::BackwardError() {
  if (const auto* backward = current_backward()) result_ = backward->future_result_;
}

std::string BackwardError::text() const noexcept {
  try {
    return result_ && result_->hasError() ? text_of(result_->exception_ptr()) : std::string();
  } catch (...) {  // no memory for a text
    return {};
  }
}

}  // namespace trireme
