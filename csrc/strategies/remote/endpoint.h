#pragma once

#include <trireme/comm/launch/launch.h>
#include <trireme/common/export.h>
#include <trireme/strategies/remote/remote_module.h>
#include <trireme/strategies/remote/rpc_agent.h>
#include <trireme/strategies/remote/typed_definitions.h>
#include <trireme/strategies/remote/typed_values.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme::remote {

// The future of a call. Thread-safe.
template <typename T>
class Future {
 public:
  Future(std::shared_ptr<RpcAgent> agent, PendingCallPtr call)
      : agent_(std::move(agent)), call_(std::move(call)) {}

  // Returns the result, or throws the call's exception; may be called again.
  T wait() const {
    if constexpr (std::is_void_v<T>) {
      agent_->finish(call_);
    } else {
      return value_as<T>(agent_->finish(call_), "the result");
    }
  }
  bool is_completed() const { return agent_->is_done(*call_); }

 private:
  std::shared_ptr<RpcAgent> agent_;
  PendingCallPtr call_;
};

struct ModuleOptions {
  std::optional<OptimizerSpec> optimizer = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

// Calls functions that other processes, or this one, have defined. `to` is a name of names().
// Arguments and results are of the types in typed_values.h; tensors are copied, without their
// graph. Every call throws the callee's exception (failures.h), c10::DistBackendError naming callee
// and function if the callee is gone or has not answered in time, c10::ValueError for a name that
// no rank has, and c10::Error after stop(). Thread-safe. A call is one message there and one back.
class TRIREME_API Caller {
 public:
  Caller(std::shared_ptr<RpcAgent> agent, std::optional<std::chrono::milliseconds> timeout)
      : agent_(std::move(agent)), timeout_(timeout) {}

  // Returns a caller whose calls wait for their answers up to `timeout`, in place of 30 minutes.
  Caller within(std::chrono::milliseconds timeout) const { return {agent_, timeout}; }

  template <typename T = void, typename... A>
  T call(std::string_view to, std::string name, const A&... args) const {
    return call_async<T>(to, std::move(name), args...).wait();
  }
  template <typename T = void, typename... A>
  Future<T> call_async(std::string_view to, std::string name, const A&... args) const {
    return {agent_, begin(agent_->rank_of(to), Verb::kFunction, std::move(name), nullptr,
                          {value_of(args)...})};
  }

  // Makes an object of a class at the callee, which lives as long as any Ref to it does.
  template <typename... A>
  RefPtr create(std::string_view to, std::string class_name, const A&... args) const {
    const Future<RefPtr> made{agent_, begin(agent_->rank_of(to), Verb::kCreate,
                                            std::move(class_name), nullptr, {value_of(args)...})};
    return made.wait();
  }
  template <typename T = void, typename... A>
  T call_method(const RefPtr& ref, const std::string& method, const A&... args) const {
    return call_method_async<T>(ref, method, args...).wait();
  }
  template <typename T = void, typename... A>
  Future<T> call_method_async(const RefPtr& ref, const std::string& method,
                              const A&... args) const {
    return {agent_, begin(ref->address().owner, Verb::kMethod,
                          ref->address().class_name + "." + method, ref, {value_of(args)...})};
  }

 private:
  PendingCallPtr begin(int64_t to, Verb verb, std::string name, const RefPtr& ref,
                       Values args) const;

 protected:
  const std::shared_ptr<RpcAgent>& agent() const { return agent_; }

 private:
  std::shared_ptr<RpcAgent> agent_;
  std::optional<std::chrono::milliseconds> timeout_;
};

struct EndpointOptions {
  int64_t threads = 4;  // calls served at one time
};

// Lets this process call others, and be called. An endpoint that is destroyed without stop() ends
// as if its process had.
//
//   trireme::Context ctx = trireme::init();
//   trireme::remote::Endpoint endpoint(ctx, "trainer0");
//   at::Tensor sum = endpoint.call<at::Tensor>("ps0", "add", a, b);
//   endpoint.stop();
class TRIREME_API Endpoint : public Caller {
 public:
  // Collective. Throws c10::ValueError on all ranks alike for names that are equal or empty, fewer
  // than one thread, and definitions that differ or are doubled.
  Endpoint(const Context& ctx, const std::string& name, const EndpointOptions& options = {});
  Endpoint(const std::shared_ptr<Communicator>& communicator, const std::string& name,
           const EndpointOptions& options = {});
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Returns the names of all ranks.
  const std::vector<std::string>& names() const { return agent()->names(); }
  int64_t rank() const { return agent()->where().rank; }

  // Makes a Ref to an object of this process, whose class define_class() has defined.
  template <typename T>
  RefPtr here(std::shared_ptr<T> object, const std::string& class_name) const {
    return agent()->show(std::make_shared<HostedObject<T>>(std::move(object)), class_name);
  }
  // Returns an object of this process; null for one of another process, or of another type.
  template <typename T>
  T* local_value(const RefPtr& ref) const {
    const auto hosted = std::dynamic_pointer_cast<HostedObject<T>>(agent()->find(ref->address()));
    return hosted ? &hosted->object() : nullptr;
  }

  // Calls a factory of modules.
  template <typename... A>
  RemoteModule module(std::string_view to, std::string factory, const ModuleOptions& options,
                      const A&... args) const {
    return {agent(),
            {agent()->rank_of(to),
             std::move(factory),
             {value_of(args)...},
             {},
             options.optimizer,
             options.timeout}};
  }

  // Collective: serves until all live ranks have called it. Throws c10::DistBackendError naming the
  // missing ranks, if the others were silent for as long as the group's timeout, and with the
  // reason if no message passes between ranks that are there; then this rank serves no more.
  void stop();
};

}  // namespace trireme::remote
