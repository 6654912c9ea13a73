#pragma once

#include <trireme/strategies/remote/definitions.h>
#include <trireme/strategies/remote/typed_values.h>

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>

namespace trireme::remote {

// Functions that define what other processes may call, before start():
//
//   remote::define("add", [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
//   remote::define_class<Counter>("Counter", remote::init<int64_t>(),
//                                 remote::method("add", &Counter::add));
//   remote::define_module("make_net", [](int64_t width) { return torch::nn::Linear(width, 1); });
//
// Parameters and results are of the types in typed_values.h, and arguments come by position.
// Several threads may call a definition at one time. The call throws its exceptions, with their
// text.

// Declared only, to deduce a function's parameter types.
template <typename R, typename... A>
std::tuple<std::remove_cvref_t<A>...> arguments_of(R (*)(A...));
template <typename R, typename C, typename... A>
std::tuple<std::remove_cvref_t<A>...> arguments_of(R (C::*)(A...));
template <typename R, typename C, typename... A>
std::tuple<std::remove_cvref_t<A>...> arguments_of(R (C::*)(A...) const);
template <typename F>
auto arguments_of(const F&) -> decltype(arguments_of(&F::operator()));

template <typename F>
using ArgumentsOf = decltype(arguments_of(std::declval<F>()));

// Throws c10::TypeError if there are not `count` arguments, or some by keyword.
TRIREME_API void check_arguments(const Values& args, const Dict& kwargs, size_t count);

// Calls a function with values.
template <typename Arguments, typename F>
auto call_typed(const F& function, const Values& args, const Dict& kwargs) {
  constexpr size_t kCount = std::tuple_size_v<Arguments>;
  check_arguments(args, kwargs, kCount);
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return function(value_as<std::tuple_element_t<I, Arguments>>(
        args[I], "args[" + std::to_string(I) + "]")...);
  }(std::make_index_sequence<kCount>());
}

// Calls a function, and returns its result as a value; None for void.
template <typename Arguments, typename F>
Value call_for_value(const F& function, const Values& args, const Dict& kwargs) {
  if constexpr (std::is_void_v<decltype(call_typed<Arguments>(function, args, kwargs))>) {
    call_typed<Arguments>(function, args, kwargs);
    return {};
  } else {
    return value_of(call_typed<Arguments>(function, args, kwargs));
  }
}

template <typename... A>
std::string text_of_types(const std::tuple<A...>*) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + Typed<A>::kind()), ...);
  return "(" + text + ")";
}

// Returns a definition without its function.
template <typename Arguments>
Definition typed_definition(std::string name, Definition::Kind kind,
                            const std::source_location& place) {
  Definition made{std::move(name), kind};
  made.language = "C++";
  made.parameters = text_of_types(static_cast<const Arguments*>(nullptr));
  made.count = std::tuple_size_v<Arguments>;
  made.place = std::string(place.file_name()) + ":" + std::to_string(place.line());
  return made;
}

template <typename F>
void define(std::string name, F function,
            const std::source_location& place = std::source_location::current()) {
  using Arguments = ArgumentsOf<F>;
  auto made = typed_definition<Arguments>(std::move(name), Definition::Kind::kFunction, place);
  made.call = [function = std::move(function)](const Invocation& call) {
    return call_for_value<Arguments>(function, call.args, call.kwargs);
  };
  Definitions::of_process().add(std::move(made));
}

// An object of a C++ class.
template <typename T>
class HostedObject final : public Hosted {
 public:
  explicit HostedObject(std::shared_ptr<T> object) : object_(std::move(object)) {}
  const void* identity() const override { return object_.get(); }
  T& object() { return *object_; }

 private:
  std::shared_ptr<T> object_;
};

// The parameter types of a class's constructor.
template <typename... A>
struct Init {
  using Arguments = std::tuple<std::remove_cvref_t<A>...>;
};
template <typename... A>
Init<A...> init() {
  return {};
}

template <typename M>
struct Method {
  std::string name;
  M member;
  int64_t batch;
};
// With a batch, the method runs once for that number of calls: it takes a std::vector of each
// argument, one item per call, and returns a std::vector of as many results.
template <typename M>
Method<M> method(std::string name, M member, int64_t batch = 0) {
  return {std::move(name), member, batch};
}

template <typename T, typename M>
void define_method(const std::string& class_name, const Method<M>& method,
                   const std::source_location& place) {
  using Arguments = ArgumentsOf<M>;
  auto made =
      typed_definition<Arguments>(class_name + "." + method.name, Definition::Kind::kMethod, place);
  made.batch = method.batch;
  made.call = [member = method.member](const Invocation& call) {
    T& object = dynamic_cast<HostedObject<T>&>(*call.object).object();
    const auto bound = [&](auto&&... args) -> decltype(auto) {
      return std::invoke(member, object, std::forward<decltype(args)>(args)...);
    };
    return call_for_value<Arguments>(bound, call.args, call.kwargs);
  };
  Definitions::of_process().add(std::move(made));
}

// The name of a class, which converts to this, and where it is defined.
struct ClassName {
  template <typename Text>
    requires std::is_convertible_v<Text, std::string>
  ClassName(Text&& text,  // NOLINT: it stands for the text
            const std::source_location& place = std::source_location::current())
      : text(std::forward<Text>(text)), place(place) {}

  std::string text;
  std::source_location place;
};

// T is constructed with the types of `init`; several threads may call its methods at one time.
template <typename T, typename... A, typename... M>
void define_class(ClassName name, Init<A...> /*init*/, const Method<M>&... methods) {
  using Arguments = typename Init<A...>::Arguments;
  auto made = typed_definition<Arguments>(name.text, Definition::Kind::kClass, name.place);
  made.make_object = [](const Invocation& call) -> std::shared_ptr<Hosted> {
    const auto make = [](auto&&... args) {
      return std::make_shared<T>(std::forward<decltype(args)>(args)...);
    };
    return std::make_shared<HostedObject<T>>(call_typed<Arguments>(make, call.args, call.kwargs));
  };
  Definitions::of_process().add(std::move(made));
  (define_method<T>(name.text, methods, name.place), ...);
}

// A module of C++, with values in place of its forward()'s types.
template <typename M>
class CppModuleBody final : public ModuleBody {
 public:
  explicit CppModuleBody(std::shared_ptr<M> module) : module_(std::move(module)) {}

  const void* identity() const override { return module_.get(); }
  Value forward(const Values& args, const Dict& kwargs) override {
    if constexpr (requires { &M::forward; }) {
      using Arguments = ArgumentsOf<decltype(&M::forward)>;
      const auto bound = [this](auto&&... all) -> decltype(auto) {
        return module_->forward(std::forward<decltype(all)>(all)...);
      };
      return call_for_value<Arguments>(bound, args, kwargs);
    } else {  // forward() is a template, as Sequential's
      const auto bound = [this](const at::Tensor& input) { return module_->forward(input); };
      return call_for_value<std::tuple<at::Tensor>>(bound, args, kwargs);
    }
  }
  Named parameters() override {
    Named named;
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& item : module_->named_parameters())
      if (seen.insert(item.value().unsafeGetTensorImpl()).second)
        named.emplace_back(item.key(), item.value());
    return named;
  }
  Named state() override {
    Named named;
    for (const auto& all : {module_->named_parameters(), module_->named_buffers()})
      for (const auto& item : all) named.emplace_back(item.key(), item.value());
    return named;
  }
  void set_training(bool training) override { module_->train(training); }

 private:
  std::shared_ptr<M> module_;
};

template <typename M>
std::shared_ptr<ModuleBody> body_of(std::shared_ptr<M> module) {
  static_assert(std::is_base_of_v<torch::nn::Module, M>);
  return std::make_shared<CppModuleBody<M>>(std::move(module));
}
template <typename M>
  requires std::is_base_of_v<torch::nn::Module, typename M::ContainedType>
std::shared_ptr<ModuleBody> body_of(const M& holder) {
  return body_of(holder.ptr());
}

// The factory returns a module holder or a std::shared_ptr of a module. If it returns one module
// twice, the callers share its parameters.
template <typename F>
void define_module(std::string name, F factory,
                   const std::source_location& place = std::source_location::current()) {
  using Arguments = ArgumentsOf<F>;
  auto made = typed_definition<Arguments>(std::move(name), Definition::Kind::kFunction, place);
  made.make_module = [factory = std::move(factory)](const Invocation& call) {
    return body_of(call_typed<Arguments>(factory, call.args, call.kwargs));
  };
  Definitions::of_process().add(std::move(made));
}

}  // namespace trireme::remote
