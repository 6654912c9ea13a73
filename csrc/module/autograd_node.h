#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace trireme {

using NodePtr = decltype(torch::autograd::Edge::function);

// Makes a shared_ptr up to torch 2.12, an intrusive_ptr since.
template <typename Node, typename Ptr = NodePtr, typename... Args>
Ptr make_node(Args&&... args) {
  if constexpr (std::is_convertible_v<std::shared_ptr<Node>, Ptr>) {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

}  // namespace trireme
