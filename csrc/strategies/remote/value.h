#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme::remote {

class Ref;
using RefPtr = std::shared_ptr<const Ref>;

struct Value;
using Values = std::vector<Value>;

struct Bytes {
  std::string bytes = {};
};
// Without `= {}`, for which clang wants to know all of a Value here.
struct List {
  Values items;
};
struct Tuple {
  Values items;
};
struct Set {
  Values items;  // keys, as those of a Dict
};
// Keeps its order. A key is nothing, a bool, an integer, a double, a text, bytes, or a tuple of
// such.
struct Dict {
  Values keys;
  Values values;  // parallel to `keys`
};

// Is what a call takes and returns. Tensors are those that were put in, or, of a message, ones over
// memory of their own.
struct TRIREME_API Value {
  using Content = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes,
                               at::Tensor, RefPtr, List, Tuple, Set, Dict>;

  Value() = default;
  template <typename T, typename = std::enable_if_t<!std::is_same_v<std::decay_t<T>, Value>>>
  Value(T&& content) : content(std::forward<T>(content)) {}  // NOLINT: it stands for what it holds

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

// Says what a value is in messages, by Python's names: "None", "an int", "a Tensor", "a dict".
TRIREME_API const char* kind_of(const Value& value);

// Nesting up to this is understood.
inline constexpr int kDeepest = 100;

}  // namespace trireme::remote
