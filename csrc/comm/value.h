#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme::values {

class Ref;
using RefPtr = std::shared_ptr<const Ref>;

struct Value;
using Values = std::vector<Value>;

struct Bytes {
  std::string bytes = {};
};
// An integer that int64_t does not hold, in two's complement: little-endian, no byte more than it
// takes.
struct LargeInt {
  std::string bytes = {};
};
struct Complex {
  double real = 0;
  double imag = 0;
};
// These have no `= {}`, for which clang would need a complete Value here.
struct List {
  Values items;
};
struct Tuple {
  Values items;
};
struct Set {
  Values items;  // keys, as those of a Dict
};
// A dict that keeps its order. A key is None, a bool, a number, a text, bytes, or a tuple of keys.
struct Dict {
  Values keys;
  Values values;  // parallel to `keys`
};

// What ranks send each other: an argument or result of a call, an object of Horovod's. Its tensors
// are the ones that were put in, or, from a message, tensors with memory of their own.
struct TRIREME_API Value {
  using Content = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes,
                               at::Tensor, RefPtr, List, Tuple, Set, Dict, LargeInt, Complex>;

  Value() = default;
  template <typename T, typename = std::enable_if_t<!std::is_same_v<std::decay_t<T>, Value>>>
  Value(T&& content) : content(std::forward<T>(content)) {}  // NOLINT: it stands for its content

  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(content);
  }
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&content);
  }

  Content content = {};
};

// Returns the kind of a value for messages, by Python's names: "None", "an int", "a Tensor", "a
// dict".
TRIREME_API const char* kind_of(const Value& value);

// The deepest nesting of a value that is understood.
inline constexpr int kDeepest = 100;

}  // namespace trireme::values
