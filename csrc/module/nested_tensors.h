#pragma once

#include <trireme/common/export.h>
#include <trireme/module/for_each_tensor.h>

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

// Whether a type holds tensors and can neither be cut nor be given to every replica as it is: types
// of torch's, and containers of references to tensors, or of const ones.
template <typename T, typename Elements = typename ElementsOf<T>::type>
inline constexpr bool kCannotBeCut = std::is_same_v<T, torch::nn::utils::rnn::PackedSequence> ||
                                     (kHoldsTensors<T> && !std::is_same_v<T, std::decay_t<T>>);
template <typename T>
inline constexpr bool kCannotBeCut<c10::ArrayRef<T>, std::tuple<>> = kHoldsTensors<T>;
template <typename T, typename First, typename... Rest>
inline constexpr bool kCannotBeCut<T, std::tuple<First, Rest...>> =
    kCannotBeCut<First> || (kCannotBeCut<Rest> || ...);

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
    if constexpr (kHoldsTensors<T>) enter(values);
  }

  std::vector<std::vector<at::Tensor>> take() { return std::move(found_); }

 private:
  template <typename T>
  using Values = std::vector<const T*>;

  // Collects what `get` gives for each of `values`.
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
