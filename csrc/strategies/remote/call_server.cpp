#include <trireme/strategies/remote/call_server.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/strategies/remote/failures.h>
#include <trireme/strategies/remote/remote_module_session.h>
#include <trireme/strategies/remote/sendable.h>
#include <trireme/sync/table_parameters.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace trireme::remote {
namespace {

constexpr const char* kNoObject = "Keep a Ref as long as others use the object.";

constexpr size_t kTextAtMost = 4000;

// Returns the beginning of a text, up to the end of a character.
std::string cut(const std::string& text, size_t length) {
  while (length < text.size() && length > 0 &&
         (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
    --length;
  return text.substr(0, length);
}

// Returns the definition of a name and kind, or throws, listing the names that are defined.
std::shared_ptr<const Definition> definition_of(const std::string& name, Definition::Kind kind) {
  const Definitions& all = Definitions::of_process();
  auto found = all.find(name);
  if (found && found->kind == kind) return found;
  C10_THROW_ERROR(ValueError, error_text("remote",
                                         "got a call of the " + std::string(text_of(kind)) + " '" +
                                             name + "', which is not defined here; there is " +
                                             list_of(all.names(kind)),
                                         {}, "Define it in both processes before start()."));
}

// Throws ValueError for parameters whose gradients a table takes from .grad: here they are kept
// apart for each caller, so it would have nothing to push.
void refuse_parameters_of_tables(ModuleBody& body) {
  for (const auto& [name, parameter] : body.parameters()) {
    TORCH_CHECK_VALUE(
        trireme::table_of(parameter) == nullptr,
        error_text("remote",
                   "got '" + name +
                       "' of a table of a server in a module of a factory, expected modules of "
                       "this process alone",
                   {}, "Return the plain module: gradients stay apart for each caller."));
  }
}

}  // namespace

void CallServer::take(ServedCall call) {
  std::exception_ptr error;
  try {
    if (call.call.verb == Verb::kMethod) {
      const auto method = find_method(call);
      if (method->batch > 0) return take_into_batch(method, std::move(call));
    }
  } catch (...) {
    error = std::current_exception();
  }
  threads_.run(
      [this, call = std::move(call), error]() mutable { error ? fail(call, error) : serve(call); });
}

// Finds the object of a call, and returns the definition of its method.
std::shared_ptr<const Definition> CallServer::find_method(ServedCall& call) const {
  const RefTable::Found found = object_of(call.call);
  const std::string& name = call.call.name;
  const size_t length = found.class_name.size();
  TORCH_CHECK_TYPE(
      name.compare(0, length, found.class_name) == 0 && name.size() > length && name[length] == '.',
      error_text("remote", "got " + call.what + " for an object of class " + found.class_name, {},
                 "Call a method of its own class."));
  call.object = found.object;
  return definition_of(name, Definition::Kind::kMethod);
}

// Calls enter batches as they come: a call that was overtaken by later ones might wait for ever.
void CallServer::take_into_batch(const std::shared_ptr<const Definition>& method, ServedCall call) {
  Batches::Gathered gathered = batches_.add(*method, std::move(call));
  if (gathered.calls.empty() && gathered.late.empty()) return;
  // Late calls may hold objects of the user's, which are destroyed on a serving thread.
  threads_.run([this, method, gathered = std::move(gathered)] {
    if (!gathered.calls.empty()) serve_batch(*method, gathered.calls);
  });
}

void CallServer::serve(ServedCall& call) {
  TRIREME_TRACE("remote_serve");
  try {
    const Value result = run(call);
    answer(call, result);
  } catch (...) {
    fail(call, std::current_exception());
  }
}

Value CallServer::run(ServedCall& call) {
  CallMessage& message = call.call;
  const Invocation invocation{call.object.get(), message.args, message.kwargs};
  switch (message.verb) {
    case Verb::kFunction: {
      const auto function = definition_of(message.name, Definition::Kind::kFunction);
      TORCH_CHECK_TYPE(
          function->call,
          error_text("remote", "got a call of " + message.name + ", which returns a module", {},
                     "Make a remote.Module of it."));
      return function->call(invocation);
    }
    case Verb::kMethod:
      return definition_of(message.name, Definition::Kind::kMethod)->call(invocation);
    case Verb::kCreate: {
      const auto made = definition_of(message.name, Definition::Kind::kClass);
      return replies_.show(made->make_object(invocation), made->name);
    }
    case Verb::kMakeModule:
      return make_module(message);
    default: {
      call.object = object_of(message).object;
      const auto session = std::dynamic_pointer_cast<RemoteModuleSession>(call.object);
      TORCH_CHECK_VALUE(session, error_text("remote", "got a " + call.what + ", which is no module",
                                            {}, "Run the same Trireme on every rank."));
      return session->serve(message.verb, message, {threads_, call.deadline});
    }
  }
}

// Takes the optimizer, or None, the arguments and the keyword arguments of the factory.
Value CallServer::make_module(const CallMessage& call) {
  const auto factory = definition_of(call.name, Definition::Kind::kFunction);
  TORCH_CHECK_TYPE(factory->make_module,
                   error_text("remote", "got " + call.name + ", which returns no module", {},
                              "Pass a function that returns one."));
  const auto* args = call.args.size() == 3 ? call.args[1].get_if<Tuple>() : nullptr;
  const auto* kwargs = call.args.size() == 3 ? call.args[2].get_if<Dict>() : nullptr;
  if (args == nullptr || kwargs == nullptr) refuse_message("of another form");
  std::optional<OptimizerSpec> optimizer;
  if (!call.args[0].is<std::monostate>()) optimizer = optimizer_of(call.args[0]);
  const std::shared_ptr<ModuleBody> body = factory->make_module({nullptr, args->items, *kwargs});
  refuse_parameters_of_tables(*body);
  auto module = modules_.of(body);
  return replies_.show(
      std::make_shared<RemoteModuleSession>(std::move(module), std::move(optimizer)),
      "module " + call.name);
}

void CallServer::serve_batch(const Definition& method, const std::vector<ServedCall>& calls) {
  TRIREME_TRACE("remote_serve");
  try {
    const Values results = call_batch(method, calls);
    for (size_t i = 0; i < calls.size(); ++i) answer(calls[i], results[i]);
  } catch (...) {
    for (const ServedCall& call : calls) fail(call, std::current_exception());
  }
}

void CallServer::answer(const ServedCall& call, const Value& result) {
  std::exception_ptr error;
  try {
    check_sendable(call.call.verb, result, replies_.reaches_devices(call.from));
    replies_.reply(call.from, {MessageKind::kAnswer, call.number}, result, call.deadline);
  } catch (...) {
    error = std::current_exception();  // the result cannot be sent, or a Ref in it cannot be lent
  }
  if (error) fail(call, error);
}

void CallServer::fail(const ServedCall& call, const std::exception_ptr& error) noexcept {
  try {
    Failure failure = describe_failure(error);
    failure.where = call.what + " at " + replies_.name_of_own();
    const Head head{MessageKind::kFailure, call.number};
    try {
      replies_.reply(call.from, head, to_value(failure), call.deadline);
    } catch (const c10::DistBackendError&) {
      // If there is no memory for a message, one of a few lines still gets through.
      failure.text = cut(failure.text, kTextAtMost);
      failure.traceback.clear();
      replies_.reply(call.from, head, to_value(failure), call.deadline);
    }
  } catch (const std::exception&) {  // the caller is gone
  }
}

RefTable::Found CallServer::object_of(const CallMessage& call) const {
  RefTable::Found found;
  if (call.session == session_) found = refs_.find(call.object);
  TORCH_CHECK_VALUE(found.object, error_text("remote",
                                             "got " + what_of(call.verb, call.name) +
                                                 " for a dead object; there are objects of " +
                                                 list_of(refs_.classes()),
                                             {}, kNoObject));
  return found;
}

}  // namespace trireme::remote
