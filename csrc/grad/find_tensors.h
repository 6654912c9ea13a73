#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// Collects the tensors in what a C++ module's forward() returns. Types it does not know hold none
// in its eyes; a reducer then arms at the first parameter's gradient (see grad_reducer.h).
class TensorCollector {
 public:
  template <typename T>
  void visit(const T& /*anything else*/) {}
  void visit(const at::Tensor& tensor) {
    if (tensor.defined()) found_.push_back(tensor);
  }
  template <typename T, typename A>
  void visit(const std::vector<T, A>& items) {
    for (const auto& item : items) visit(item);
  }
  template <typename T, size_t N>
  void visit(const std::array<T, N>& items) {
    for (const auto& item : items) visit(item);
  }
  template <typename T>
  void visit(const std::optional<T>& item) {
    if (item) visit(*item);
  }
  template <typename A, typename B>
  void visit(const std::pair<A, B>& items) {
    visit(items.first);
    visit(items.second);
  }
  template <typename... T>
  void visit(const std::tuple<T...>& items) {
    std::apply([this](const auto&... item) { (visit(item), ...); }, items);
  }
  template <typename K, typename T>
  void visit(const std::map<K, T>& items) {
    for (const auto& item : items) visit(item.second);
  }
  template <typename K, typename T>
  void visit(const std::unordered_map<K, T>& items) {
    for (const auto& item : items) visit(item.second);
  }

  std::vector<at::Tensor> take() { return std::move(found_); }

 private:
  std::vector<at::Tensor> found_;
};

template <typename Output>
std::vector<at::Tensor> find_tensors(const Output& output) {
  TensorCollector collector;
  collector.visit(output);
  return collector.take();
}

}  // namespace trireme
