#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn::utils::rnn {
class PackedSequence;
}

namespace trireme {

// Whether values of a type are cut along the batch and put together again: tensors, and standard
// containers of them.
template <typename T>
inline constexpr bool kIsScattered = std::is_same_v<T, at::Tensor>;
template <typename T, typename A>
inline constexpr bool kIsScattered<std::vector<T, A>> = kIsScattered<T>;
template <typename T, size_t N>
inline constexpr bool kIsScattered<std::array<T, N>> = kIsScattered<T>;
template <typename T>
inline constexpr bool kIsScattered<std::optional<T>> = kIsScattered<T>;
template <typename A, typename B>
inline constexpr bool kIsScattered<std::pair<A, B>> = kIsScattered<A> || kIsScattered<B>;
template <typename... T>
inline constexpr bool kIsScattered<std::tuple<T...>> = (kIsScattered<T> || ...);
template <typename K, typename T, typename C, typename A>
inline constexpr bool kIsScattered<std::map<K, T, C, A>> = kIsScattered<T>;
template <typename K, typename T, typename H, typename E, typename A>
inline constexpr bool kIsScattered<std::unordered_map<K, T, H, E, A>> = kIsScattered<T>;

// What holds tensors and can neither be cut nor be given to every replica as it is.
template <typename T>
inline constexpr bool kCannotBeCut = std::is_same_v<T, torch::nn::utils::rnn::PackedSequence>;
template <typename T>
inline constexpr bool kCannotBeCut<c10::ArrayRef<T>> = kIsScattered<T>;

// Calls visit(at::Tensor&) for each tensor of a value, undefined ones too, in an order that stays
// while its containers do.
template <typename Visit>
class TensorVisitor {
 public:
  explicit TensorVisitor(Visit& visit) : visit_(visit) {}

  template <typename T>
  void go(T& value) {
    if constexpr (kIsScattered<T>) enter(value);
  }

 private:
  void enter(at::Tensor& tensor) { visit_(tensor); }
  template <typename T>
  void enter(std::optional<T>& item) {
    if (item) go(*item);
  }
  template <typename A, typename B>
  void enter(std::pair<A, B>& items) {
    go(items.first);
    go(items.second);
  }
  template <typename... T>
  void enter(std::tuple<T...>& items) {
    std::apply([this](auto&... item) { (go(item), ...); }, items);
  }
  template <typename K, typename T, typename C, typename A>
  void enter(std::map<K, T, C, A>& items) {
    for (auto& item : items) go(item.second);
  }
  template <typename K, typename T, typename H, typename E, typename A>
  void enter(std::unordered_map<K, T, H, E, A>& items) {
    for (auto& item : items) go(item.second);
  }
  template <typename List>
  void enter(List& items) {  // a vector or an array
    for (auto& item : items) go(item);
  }

  Visit& visit_;
};

template <typename T, typename Visit>
void for_each_tensor(T& value, Visit&& visit) {
  TensorVisitor<std::remove_reference_t<Visit>>(visit).go(value);
}

// The tensors of several values of one type side by side: [value][tensor], in the order in which
// for_each_tensor() meets them in the first, maps by key.
class TRIREME_API TensorsSideBySide {
 public:
  // `describe` names the origin of a value, for messages.
  using Describe = std::function<std::string(size_t value)>;
  TensorsSideBySide(size_t values, Describe describe)
      : found_(values), describe_(std::move(describe)) {}

  // Throws ValueError naming the values where containers differ in length or keys.
  template <typename T>
  void collect(const std::vector<const T*>& values) {
    if constexpr (kIsScattered<T>) enter(values);
  }

  std::vector<std::vector<at::Tensor>> take() { return std::move(found_); }

 private:
  template <typename T>
  using Values = std::vector<const T*>;

  // What `get` gives for each of `values`.
  template <typename T, typename Get>
  void collect_each(const Values<T>& values, Get get) {
    using Item = std::remove_cvref_t<decltype(get(*values.front()))>;
    Values<Item> items;
    for (const T* value : values) items.push_back(&get(*value));
    collect(items);
  }
  template <typename T, typename Length>
  void check(const Values<T>& values, Length length) {
    for (size_t i = 1; i < values.size(); ++i)
      if (length(*values[i]) != length(*values[0]))
        refuse_length(i, length(*values[i]), length(*values[0]));
  }
  template <typename Map>
  void collect_maps(const Values<Map>& maps) {
    check(maps, [](const Map& map) { return map.size(); });
    for (const auto& [key, own] : *maps.front()) {
      Values<typename Map::mapped_type> items;
      for (size_t i = 0; i < maps.size(); ++i) {
        const auto found = maps[i]->find(key);
        if (found == maps[i]->end()) refuse_keys(i);
        items.push_back(&found->second);
      }
      collect(items);
    }
  }

  void enter(const Values<at::Tensor>& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) found_[i].push_back(*tensors[i]);
  }
  template <typename T>
  void enter(const Values<std::optional<T>>& items) {
    check(items, [](const std::optional<T>& item) { return item ? 1U : 0U; });
    if (*items.front()) collect_each(items, [](const auto& item) -> const T& { return *item; });
  }
  template <typename A, typename B>
  void enter(const Values<std::pair<A, B>>& items) {
    collect_each(items, [](const auto& item) -> const A& { return item.first; });
    collect_each(items, [](const auto& item) -> const B& { return item.second; });
  }
  template <typename... T>
  void enter(const Values<std::tuple<T...>>& items) {
    enter_tuple(items, std::index_sequence_for<T...>());
  }
  template <typename Tuple, size_t... I>
  void enter_tuple(const Values<Tuple>& items, std::index_sequence<I...> /*of elements*/) {
    (collect_each(items,
                  [](const Tuple& item) -> const std::tuple_element_t<I, Tuple>& {
                    return std::get<I>(item);
                  }),
     ...);
  }
  template <typename K, typename T, typename C, typename A>
  void enter(const Values<std::map<K, T, C, A>>& maps) {
    collect_maps(maps);
  }
  template <typename K, typename T, typename H, typename E, typename A>
  void enter(const Values<std::unordered_map<K, T, H, E, A>>& maps) {
    collect_maps(maps);
  }
  template <typename List>
  void enter(const Values<List>& lists) {  // vectors or arrays
    check(lists, [](const List& list) { return list.size(); });
    for (size_t i = 0; i < lists.front()->size(); ++i)
      collect_each(lists,
                   [i](const List& list) -> const typename List::value_type& { return list[i]; });
  }

  [[noreturn]] void refuse_length(size_t value, size_t got, size_t expected) const;
  [[noreturn]] void refuse_keys(size_t value) const;

  std::vector<std::vector<at::Tensor>> found_;
  Describe describe_;
};

}  // namespace trireme
