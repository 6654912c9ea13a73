#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {

// A module whose forward is called with tensors, whatever its types say.
struct ModuleOfTensors {
  std::shared_ptr<torch::nn::Module> module;
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> forward;
};

namespace tensor_forwards {

using Tensors = std::vector<at::Tensor>;

template <typename T>
struct IsTensorTuple : std::false_type {};
template <typename... T>
struct IsTensorTuple<std::tuple<T...>>
    : std::bool_constant<(std::is_same_v<T, at::Tensor> && ...)> {};

template <typename T>
constexpr bool is_one_of_many =
    std::is_same_v<std::decay_t<T>, Tensors> || IsTensorTuple<std::decay_t<T>>::value;

inline void expect(size_t got, size_t expected) {
  TORCH_CHECK_VALUE(got == expected, "got ", got, " tensors, expected ", expected,
                    " as the forward takes");
}

template <typename Tuple, size_t... i>
Tuple to_tuple(Tensors tensors, std::index_sequence<i...>) {
  return Tuple(std::move(tensors[i])...);
}

template <typename Result>
Tensors to_tensors(Result result) {
  if constexpr (std::is_same_v<Result, Tensors>) {
    return result;
  } else if constexpr (IsTensorTuple<Result>::value) {
    return std::apply([](auto&&... tensors) { return Tensors{std::move(tensors)...}; },
                      std::move(result));
  } else {
    static_assert(std::is_same_v<Result, at::Tensor>,
                  "the forward of a stage returns a tensor, a tuple or a vector of tensors");
    return {std::move(result)};
  }
}

// Calls a forward with arguments of these types.
template <typename Impl, typename... Arguments, size_t... i>
Tensors call_with_each(Impl& impl, Tensors& given, std::index_sequence<i...>) {
  static_assert((std::is_same_v<std::decay_t<Arguments>, at::Tensor> && ...),
                "the forward of a stage takes tensors, or one tuple or vector of them");
  expect(given.size(), sizeof...(Arguments));
  return to_tensors(impl.forward(static_cast<Arguments&&>(given[i])...));
}

template <typename Impl, typename... Arguments>
Tensors call(Impl& impl, Tensors given) {
  if constexpr (sizeof...(Arguments) == 1 && (is_one_of_many<Arguments> && ...)) {
    using Many = std::decay_t<std::tuple_element_t<0, std::tuple<Arguments...>>>;
    if constexpr (std::is_same_v<Many, Tensors>) {
      return to_tensors(impl.forward(std::move(given)));
    } else {
      expect(given.size(), std::tuple_size_v<Many>);
      auto all =
          to_tuple<Many>(std::move(given), std::make_index_sequence<std::tuple_size_v<Many>>());
      return to_tensors(impl.forward(std::move(all)));
    }
  } else {
    return call_with_each<Impl, Arguments...>(impl, given, std::index_sequence_for<Arguments...>());
  }
}

template <typename Impl, typename Owner, typename Result, typename... Arguments>
auto caller(std::shared_ptr<Impl> impl, Result (Owner::*)(Arguments...)) {
  return [impl = std::move(impl)](Tensors given) {
    return call<Impl, Arguments...>(*impl, std::move(given));
  };
}
template <typename Impl, typename Owner, typename Result, typename... Arguments>
auto caller(std::shared_ptr<Impl> impl, Result (Owner::*)(Arguments...) const) {
  return caller(std::move(impl), static_cast<Result (Impl::*)(Arguments...)>(nullptr));
}

}  // namespace tensor_forwards

template <typename Impl>
ModuleOfTensors module_of_tensors(std::shared_ptr<Impl> impl) {
  if constexpr (std::is_same_v<Impl, torch::nn::SequentialImpl>) {  // its forward is a template
    return {impl, [impl](std::vector<at::Tensor> given) {
              tensor_forwards::expect(given.size(), 1);
              return std::vector<at::Tensor>{impl->forward(std::move(given.front()))};
            }};
  } else {
    return {impl, tensor_forwards::caller(impl, &Impl::forward)};
  }
}
template <typename Impl>
ModuleOfTensors module_of_tensors(torch::nn::ModuleHolder<Impl> holder) {
  return module_of_tensors(holder.ptr());
}

}  // namespace trireme
