#pragma once

#include <trireme/module/cast_tensors.h>
#include <trireme/module/find_tensors.h>
#include <trireme/module/for_each_tensor.h>
#include <trireme/optim/write_gate.h>
#include <trireme/strategies/fsdp/sharded_module.h>

#include <torch/nn/pimpl.h>

#include <concepts>
#include <exception>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {

// The type of the module in a holder (TORCH_MODULE) or a shared_ptr.
template <typename M>
struct ContainedIn {
  using type = typename M::ContainedType;
};
template <typename Net>
struct ContainedIn<std::shared_ptr<Net>> {
  using type = Net;
};

// A forward that is one method without default arguments is wrapped as such, so that Sequential and
// AnyModule take it; any other as a template.
template <typename Net, typename Arguments, size_t... I>
constexpr bool takes_fewer(std::index_sequence<I...> /*all but the last*/) {
  return requires(Net& module) {
    module.forward(std::declval<std::tuple_element_t<I, Arguments>>()...);
  };
}
template <typename Net, typename Method>
struct PlainForward {
  using type = void;
};
template <typename Net, typename Result, typename Class, typename... Args>
  requires(!std::is_reference_v<Result>)
struct PlainForward<Net, Result (Class::*)(Args...)> {
  static constexpr bool takes_fewer_arguments() {
    if constexpr (sizeof...(Args) > 0) {
      return takes_fewer<Net, std::tuple<Args...>>(std::make_index_sequence<sizeof...(Args) - 1>());
    } else {
      return false;
    }
  }
  using type = std::conditional_t<takes_fewer_arguments(), void, Result (Class::*)(Args...)>;
};
template <typename Net>
constexpr auto forward_method_of() {
  if constexpr (requires { &Net::forward; }) {
    return std::type_identity<typename PlainForward<Net, decltype(&Net::forward)>::type>();
  } else {
    return std::type_identity<void>();
  }
}

// Whether find_tensors() sees all tensors that a value of a type may hold.
template <typename T, typename Elements = typename ElementsOf<std::remove_cvref_t<T>>::type>
inline constexpr bool kFindsAllTensors = std::is_same_v<std::remove_cvref_t<T>, at::Tensor> ||
                                         std::is_arithmetic_v<T> || std::is_enum_v<T>;
template <typename T, typename First, typename... Rest>
inline constexpr bool kFindsAllTensors<T, std::tuple<First, Rest...>> =
    kFindsAllTensors<First> && (kFindsAllTensors<Rest> && ...);

// A unit and the type of its module.
template <typename Net>
class ShardedHolding : public ShardedModule {
 protected:
  ShardedHolding(std::shared_ptr<Net> module, FsdpOptions options)
      : ShardedModule(module, std::move(options)), module_(std::move(module)) {}

  template <typename... Args>
  auto run(Args&&... args) {
    try {
      return call(std::forward<Args>(args)...);
    } catch (const std::exception& error) {
      abandon(error.what());
      throw;
    } catch (...) {
      abandon("an exception that says nothing");
      throw;
    }
  }

  std::shared_ptr<Net> module_;

 private:
  template <typename... Args>
  auto call(Args&&... args) {
    enter(gathers() ? inputs_of(args...) : std::vector<at::Tensor>());
    auto output = input_dtype() ? call_cast(std::forward<Args>(args)...)
                                : module_->forward(std::forward<Args>(args)...);
    leave(find_tensors(output), kFindsAllTensors<decltype(output)>);
    cast_tensors(output, output_dtype());
    return output;
  }

  template <typename... Args>
  static std::vector<at::Tensor> inputs_of(const Args&... args) {
    std::vector<at::Tensor> inputs;
    const auto add = [&](const auto& arg) {
      const std::vector<at::Tensor> found = find_tensors(arg);
      inputs.insert(inputs.end(), found.begin(), found.end());
    };
    (add(args), ...);
    return inputs;
  }

  // Arguments that hold tensors are copied and cast; others are handed on.
  template <typename Arg>
  using Held =
      std::conditional_t<kHoldsTensors<std::remove_cvref_t<Arg>>, std::remove_cvref_t<Arg>, Arg&&>;
  template <typename... Args>
  auto call_cast(Args&&... args) {
    std::tuple<Held<Args>...> held{std::forward<Args>(args)...};
    return std::apply(
        [this](auto&... one) {
          (cast_tensors(one, input_dtype()), ...);
          return module_->forward(static_cast<Args&&>(one)...);
        },
        held);
  }
};

template <typename Net, typename Method>
class ShardedForward : public ShardedHolding<Net> {
 public:
  // Any arguments; outputs may be tensors, or vectors, arrays, tuples, pairs, maps and optionals of
  // them. Of any other type they work, too; a unit that gathers then stays unsharded until backward
  // is over.
  template <typename... Args>
  auto forward(Args&&... args) {
    return this->run(std::forward<Args>(args)...);
  }

 protected:
  using ShardedHolding<Net>::ShardedHolding;
};
template <typename Net, typename Result, typename Class, typename... Args>
class ShardedForward<Net, Result (Class::*)(Args...)> : public ShardedHolding<Net> {
 public:
  Result forward(Args... args) { return this->run(std::forward<Args>(args)...); }

 protected:
  using ShardedHolding<Net>::ShardedHolding;
};

template <typename M>
class ShardedImpl final
    : public ShardedForward<
          typename ContainedIn<M>::type,
          typename decltype(forward_method_of<typename ContainedIn<M>::type>())::type> {
  using Net = typename ContainedIn<M>::type;
  using Base = ShardedForward<Net, typename decltype(forward_method_of<Net>())::type>;

 public:
  explicit ShardedImpl(M module, FsdpOptions options = {})
      : Base(pointer_to(module), std::move(options)) {}

  // Returns the user's module, which has whole parameters; see [Note: a sharded C++ module].
  Net& module() { return *this->module_; }

 private:
  static std::shared_ptr<Net> pointer_to(const M& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }
};

// A module whose parameters, gradients and, through them, optimizer state are sharded over the
// ranks: torch.distributed.fsdp.fully_shard for C++ modules, which LibTorch has not.
//
//   trireme::Context ctx = trireme::init();
//   auto model = trireme::fully_shard(net);
//   torch::optim::AdamW optimizer(model->parameters(), options);
//   loss_of(model->forward(input)).backward();    // averages
//   model->clip_grad_norm_(1.0);
//   trireme::step(optimizer);                     // or an optimizer of trireme::optim, by itself
//
// It is a unit, whose parameters belong together, and goes where a module goes, also into a module
// that is sharded afterwards, whose unit then has the rest:
//
//   struct BlockImpl : torch::nn::Module { trireme::Sharded<torch::nn::Linear> inside; ... };
//   inside = register_module("inside", trireme::fully_shard(torch::nn::Linear(8, 8)));
//
// `M`: a module holder (TORCH_MODULE) or a shared_ptr to a module. Construct on every rank, inner
// units first, in the same order; use the outermost one first; destroy it before the Context shuts
// down. Ranks keep the values of their own shards, as in torch: start from one seed. Initialise
// before, or write shards before the first forward. What it costs, throws and guarantees: fsdp.h
// and [Note: a sharded C++ module].
template <typename M>
class Sharded : public torch::nn::ModuleHolder<ShardedImpl<M>> {
 public:
  using torch::nn::ModuleHolder<ShardedImpl<M>>::ModuleHolder;
};

template <typename M>
Sharded<M> fully_shard(M module, FsdpOptions options = {}) {
  return Sharded<M>(std::move(module), std::move(options));
}

}  // namespace trireme
