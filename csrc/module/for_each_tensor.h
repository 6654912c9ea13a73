#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// The element types of containers that may hold tensors, as a tuple of types; empty for any other
// type.
template <typename T>
struct ElementsOf : std::type_identity<std::tuple<>> {};
template <typename T, typename A>
struct ElementsOf<std::vector<T, A>> : std::type_identity<std::tuple<T>> {};
template <typename T, size_t N>
struct ElementsOf<std::array<T, N>> : std::type_identity<std::tuple<T>> {};
template <typename T>
struct ElementsOf<std::optional<T>> : std::type_identity<std::tuple<T>> {};
template <typename A, typename B>
struct ElementsOf<std::pair<A, B>> : std::type_identity<std::tuple<A, B>> {};
template <typename... T>
struct ElementsOf<std::tuple<T...>> : std::type_identity<std::tuple<T...>> {};
template <typename K, typename T, typename C, typename A>
struct ElementsOf<std::map<K, T, C, A>> : std::type_identity<std::tuple<T>> {};
template <typename K, typename T, typename H, typename E, typename A>
struct ElementsOf<std::unordered_map<K, T, H, E, A>> : std::type_identity<std::tuple<T>> {};

// Whether for_each_tensor() finds tensors in values of a type.
template <typename T, typename Elements = typename ElementsOf<std::remove_cvref_t<T>>::type>
inline constexpr bool kHoldsTensors = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;
template <typename T, typename First, typename... Rest>
inline constexpr bool kHoldsTensors<T, std::tuple<First, Rest...>> =
    kHoldsTensors<First> || (kHoldsTensors<Rest> || ...);

// Calls visit(tensor) for each tensor of a value, undefined ones too: for `value` itself, or for
// those in vectors, arrays, optionals, pairs, tuples and maps (not for their keys) of any depth, in
// an order that stays while its containers do. It may replace them, unless they are const.
template <typename T, typename Visit>
void for_each_tensor(T& value, Visit&& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (!kHoldsTensors<Value>) {
    return;
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (requires { value.has_value(); }) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (requires { typename Value::mapped_type; }) {
    for (auto& item : value) for_each_tensor(item.second, visit);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& item : value) for_each_tensor(item, visit);
  } else {
    std::apply([&](auto&... item) { (for_each_tensor(item, visit), ...); }, value);
  }
}

}  // namespace trireme
