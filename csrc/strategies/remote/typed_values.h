#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme::remote {

// Values as C++ types: Tensor, bool, integers, floating numbers, std::string, Bytes, RefPtr, Value
// itself, and std::vector (a list), std::tuple and std::pair (a tuple), std::map (a dict) and
// std::optional (None) of them.

// Throws c10::TypeError: "args[1] is a str, expected a Tensor".
[[noreturn]] TRIREME_API void refuse_value(const Value& value, const std::string& place,
                                           const std::string& expected);
// Throws c10::ValueError for an integer that is out of the type's range.
[[noreturn]] TRIREME_API void refuse_range(int64_t value, const std::string& place);

// The conversion between a C++ type and a Value: kind() for messages, to() and from(). Specialised
// below.
template <typename T>
struct Typed;

template <typename T>
Value value_of(const T& given) {
  if constexpr (std::is_convertible_v<const T&, std::string> && !std::is_same_v<T, std::string>) {
    return std::string(given);
  } else {
    return Typed<T>::to(given);
  }
}

// Converts a value; throws as refuse_value() and refuse_range() do. `place` names the value.
template <typename T>
T value_as(const Value& value, const std::string& place) {
  return Typed<std::remove_cvref_t<T>>::from(value, place);
}

template <typename T>
T held(const Value& value, const std::string& place, const char* expected) {
  const T* found = value.get_if<T>();
  if (found == nullptr) refuse_value(value, place, expected);
  return *found;
}

template <>
struct Typed<Value> {
  static std::string kind() { return "a value"; }
  static Value to(const Value& given) { return given; }
  static Value from(const Value& value, const std::string&) { return value; }
};

template <typename T>
  requires std::is_same_v<T, bool> || std::is_same_v<T, std::string> || std::is_same_v<T, Bytes> ||
           std::is_same_v<T, RefPtr>
struct Typed<T> {
  static std::string kind() { return kind_of(Value(T{})); }
  static Value to(const T& given) { return given; }
  static T from(const Value& value, const std::string& place) {
    return held<T>(value, place, kind_of(Value(T{})));
  }
};

// Tensors, and types that convert to one (torch::Tensor, Parameter).
template <>
struct Typed<at::Tensor> {
  static std::string kind() { return "a Tensor"; }
  static Value to(const at::Tensor& given) { return given; }
  static at::Tensor from(const Value& value, const std::string& place) {
    return held<at::Tensor>(value, place, "a Tensor");
  }
};

template <std::integral T>
  requires(!std::is_same_v<T, bool>)
struct Typed<T> {
  static std::string kind() { return "an int"; }
  static Value to(T given) {
    if (!std::in_range<int64_t>(given)) refuse_range(-1, "an unsigned integer");
    return static_cast<int64_t>(given);
  }
  static T from(const Value& value, const std::string& place) {
    const auto number = held<int64_t>(value, place, "an int");
    if (!std::in_range<T>(number)) refuse_range(number, place);
    return static_cast<T>(number);
  }
};

// An int may stand for a floating number, as in Python.
template <std::floating_point T>
struct Typed<T> {
  static std::string kind() { return "a float"; }
  static Value to(T given) { return static_cast<double>(given); }
  static T from(const Value& value, const std::string& place) {
    if (const auto* number = value.get_if<int64_t>()) return static_cast<T>(*number);
    return static_cast<T>(held<double>(value, place, "a float"));
  }
};

template <typename T>
struct Typed<std::optional<T>> {
  static std::string kind() { return Typed<T>::kind() + " or None"; }
  static Value to(const std::optional<T>& given) { return given ? value_of(*given) : Value(); }
  static std::optional<T> from(const Value& value, const std::string& place) {
    if (value.is<std::monostate>()) return std::nullopt;
    return value_as<T>(value, place);
  }
};

template <typename T>
struct Typed<std::vector<T>> {
  static std::string kind() { return "a list"; }
  static Value to(const std::vector<T>& given) {
    List list;
    for (const auto& element : given) list.items.push_back(value_of<T>(element));
    return list;
  }
  static std::vector<T> from(const Value& value, const std::string& place) {
    const Values* items = nullptr;
    if (const auto* list = value.get_if<List>()) items = &list->items;
    if (const auto* tuple = value.get_if<Tuple>()) items = &tuple->items;
    if (items == nullptr) refuse_value(value, place, "a list");
    std::vector<T> all;
    for (size_t i = 0; i < items->size(); ++i)
      all.push_back(value_as<T>((*items)[i], place + "[" + std::to_string(i) + "]"));
    return all;
  }
};

template <typename... Ts>
struct Typed<std::tuple<Ts...>> {
  static std::string kind() { return "a tuple of " + std::to_string(sizeof...(Ts)); }
  static Value to(const std::tuple<Ts...>& given) {
    return std::apply([](const Ts&... all) -> Value { return Tuple{{value_of(all)...}}; }, given);
  }
  static std::tuple<Ts...> from(const Value& value, const std::string& place) {
    const auto* tuple = value.get_if<Tuple>();
    if (tuple == nullptr || tuple->items.size() != sizeof...(Ts))
      refuse_value(value, place, kind());
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Ts...>{
          value_as<Ts>(tuple->items[I], place + "[" + std::to_string(I) + "]")...};
    }(std::index_sequence_for<Ts...>());
  }
};

template <typename A, typename B>
struct Typed<std::pair<A, B>> {
  static std::string kind() { return Typed<std::tuple<A, B>>::kind(); }
  static Value to(const std::pair<A, B>& given) {
    return Tuple{{value_of(given.first), value_of(given.second)}};
  }
  static std::pair<A, B> from(const Value& value, const std::string& place) {
    auto [first, second] = value_as<std::tuple<A, B>>(value, place);
    return {std::move(first), std::move(second)};
  }
};

template <typename K, typename T>
struct Typed<std::map<K, T>> {
  static std::string kind() { return "a dict"; }
  static Value to(const std::map<K, T>& given) {
    Dict dict;
    for (const auto& [key, value] : given) {
      dict.keys.push_back(value_of(key));
      dict.values.push_back(value_of(value));
    }
    return dict;
  }
  static std::map<K, T> from(const Value& value, const std::string& place) {
    const auto* dict = value.get_if<Dict>();
    if (dict == nullptr) refuse_value(value, place, "a dict");
    std::map<K, T> all;
    for (size_t i = 0; i < dict->keys.size(); ++i)
      all.emplace(value_as<K>(dict->keys[i], "a key of " + place),
                  value_as<T>(dict->values[i], place + "[...]"));
    return all;
  }
};

}  // namespace trireme::remote
