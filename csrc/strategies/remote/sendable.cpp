#include <trireme/strategies/remote/sendable.h>

#include <trireme/comm/value_check.h>

namespace trireme::remote {
namespace {

constexpr const char* kRemote = "remote";

}  // namespace

void check_sendable(const CallMessage& call, bool reaches_devices) {
  if (call.verb == Verb::kLoad && call.args.size() == 1)
    return values::check_value(call.args[0], {kRemote, "state_dict"}, reaches_devices);
  const Values* args = &call.args;
  const Dict* kwargs = &call.kwargs;
  // A module's arguments are among those of the call.
  const size_t inner = call.verb == Verb::kForward ? 3 : call.verb == Verb::kMakeModule ? 1 : 0;
  if (inner > 0 && call.args.size() > inner + 1) {
    if (const auto* tuple = call.args[inner].get_if<Tuple>()) args = &tuple->items;
    if (const auto* dict = call.args[inner + 1].get_if<Dict>()) kwargs = dict;
  }
  values::check_items(*args, {kRemote, "args"}, reaches_devices);
  values::check_pairs(*kwargs, {kRemote, "kwargs"}, reaches_devices);
}

void check_sendable(Verb verb, const Value& result, bool reaches_devices) {
  const auto* tuple = verb == Verb::kForward ? result.get_if<Tuple>() : nullptr;
  const bool is_inner = tuple != nullptr && tuple->items.size() > 1;
  values::check_value(is_inner ? tuple->items[1] : result, {kRemote, "the result"},
                      reaches_devices);
}

}  // namespace trireme::remote
