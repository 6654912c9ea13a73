#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// Whether cast_tensors() looks into values of a type: tensors, and standard containers of them.
template <typename T>
inline constexpr bool kHoldsTensors = std::is_same_v<T, at::Tensor>;
template <typename T, typename A>
inline constexpr bool kHoldsTensors<std::vector<T, A>> = kHoldsTensors<T>;
template <typename T, size_t N>
inline constexpr bool kHoldsTensors<std::array<T, N>> = kHoldsTensors<T>;
template <typename T>
inline constexpr bool kHoldsTensors<std::optional<T>> = kHoldsTensors<T>;
template <typename A, typename B>
inline constexpr bool kHoldsTensors<std::pair<A, B>> = kHoldsTensors<A> || kHoldsTensors<B>;
template <typename... T>
inline constexpr bool kHoldsTensors<std::tuple<T...>> = (kHoldsTensors<std::decay_t<T>> || ...);
template <typename K, typename T>
inline constexpr bool kHoldsTensors<std::map<K, T>> = kHoldsTensors<T>;
template <typename K, typename T>
inline constexpr bool kHoldsTensors<std::unordered_map<K, T>> = kHoldsTensors<T>;

// Brings the floating-point tensors in a value to a dtype; autograd sees it.
class TensorCaster {
 public:
  explicit TensorCaster(at::ScalarType dtype) : dtype_(dtype) {}

  void visit(at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype_);
  }
  template <typename T>
  void visit(std::optional<T>& item) {
    if (item) visit_any(*item);
  }
  template <typename A, typename B>
  void visit(std::pair<A, B>& items) {
    visit_any(items.first);
    visit_any(items.second);
  }
  template <typename... T>
  void visit(std::tuple<T...>& items) {
    std::apply([this](auto&... item) { (visit_any(item), ...); }, items);
  }
  template <typename K, typename T>
  void visit(std::map<K, T>& items) {
    for (auto& item : items) visit_any(item.second);
  }
  template <typename K, typename T>
  void visit(std::unordered_map<K, T>& items) {
    for (auto& item : items) visit_any(item.second);
  }
  template <typename List>
  void visit(List& items) {  // a vector or an array
    for (auto& item : items) visit_any(item);
  }

 private:
  template <typename T>
  void visit_any(T& item) {
    if constexpr (kHoldsTensors<std::remove_const_t<T>>) visit(item);
  }

  at::ScalarType dtype_;
};

template <typename T>
void cast_tensors(T& value, std::optional<at::ScalarType> dtype) {
  if constexpr (kHoldsTensors<T>)
    if (dtype) TensorCaster(*dtype).visit(value);
}

}  // namespace trireme
