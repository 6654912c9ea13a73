#include <trireme/strategies/remote/wire_messages.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

namespace trireme::remote {
namespace {

constexpr size_t kHeadBytes = 9;

// Returns the items of a tuple of `count`.
const Values& items_of(const Value& value, size_t count) {
  const auto* tuple = value.get_if<Tuple>();
  if (tuple == nullptr || tuple->items.size() != count) refuse_message("of another form");
  return tuple->items;
}

template <typename T>
const T& as(const Value& value) {
  const auto* found = value.get_if<T>();
  if (found == nullptr) refuse_message("with a field of another kind");
  return *found;
}

}  // namespace

void refuse_message(const char* what) {
  C10_THROW_ERROR(ValueError, error_text("remote", std::string("got a message ") + what, {},
                                         "Run the same Trireme on every rank."));
}

std::string what_of(Verb verb, const std::string& name) {
  switch (verb) {
    case Verb::kFunction:
      return "function " + name;
    case Verb::kCreate:
      return "creation of " + name;
    case Verb::kMethod: {
      const size_t dot = name.rfind('.');
      if (dot == std::string::npos) return "method " + name;
      return "method " + name.substr(dot + 1) + " of " + name.substr(0, dot);
    }
    case Verb::kMakeModule:
      return "creation of the module " + name;
    case Verb::kForward:
      return "forward of " + name;
    case Verb::kBackward:
      return "backward of " + name;
    case Verb::kStep:
      return "step of " + name;
    case Verb::kZeroGrad:
      return "zero_grad of " + name;
    case Verb::kState:
      return "state_dict of " + name;
    case Verb::kLoad:
      return "load_state_dict of " + name;
    case Verb::kParameters:
      return "remote_parameters of " + name;
  }
  return "a call";
}

EncodedValue encode_message(const Head& head, const Value& value, const AddressOf& address_of) {
  EncodedValue encoded = encode(value, address_of);
  std::string text(kHeadBytes, '\0');
  text[0] = static_cast<char>(head.kind);
  std::memcpy(text.data() + 1, &head.number, sizeof(head.number));
  encoded.text.insert(0, text);
  return encoded;
}

Head read_head(std::string_view text) {
  if (text.size() < kHeadBytes) refuse_message("that is too short");
  Head head;
  const auto kind = static_cast<uint8_t>(text[0]);
  if (kind < static_cast<uint8_t>(MessageKind::kCall) ||
      kind > static_cast<uint8_t>(MessageKind::kBye))
    refuse_message("of an unknown kind");
  head.kind = static_cast<MessageKind>(kind);
  std::memcpy(&head.number, text.data() + 1, sizeof(head.number));
  return head;
}

Value read_value(std::string_view text, const std::vector<at::Tensor>& tensors,
                 const AdoptRef& adopt) {
  if (text.size() < kHeadBytes) refuse_message("that is too short");
  return decode(text.substr(kHeadBytes), tensors, adopt);
}

Value to_value(CallMessage call) {
  Values fields;
  fields.reserve(7);
  fields.emplace_back(static_cast<int64_t>(call.verb));
  fields.emplace_back(std::move(call.name));
  fields.emplace_back(call.object);
  fields.emplace_back(call.session);
  fields.emplace_back(call.timeout_ms);
  fields.emplace_back(Tuple{std::move(call.args)});
  fields.emplace_back(std::move(call.kwargs));
  return Tuple{std::move(fields)};
}

CallMessage call_of(Value value) {
  items_of(value, 7);
  Values& items = std::get<Tuple>(value.content).items;
  const int64_t verb = as<int64_t>(items[0]);
  if (verb < 0 || verb >= kVerbs) refuse_message("with an unknown verb");
  CallMessage call;
  call.verb = static_cast<Verb>(verb);
  call.name = as<std::string>(items[1]);
  call.object = as<int64_t>(items[2]);
  call.session = as<int64_t>(items[3]);
  call.timeout_ms = as<int64_t>(items[4]);
  as<Tuple>(items[5]);
  as<Dict>(items[6]);
  call.args = std::move(std::get<Tuple>(items[5].content).items);
  call.kwargs = std::move(std::get<Dict>(items[6].content));
  for (const Value& key : call.kwargs.keys) as<std::string>(key);
  return call;
}

Value to_value(const Failure& failure) {
  return Tuple{{failure.type, failure.module, failure.text, failure.traceback, failure.where}};
}

Failure failure_of(const Value& value) {
  const Values& items = items_of(value, 5);
  return {as<std::string>(items[0]), as<std::string>(items[1]), as<std::string>(items[2]),
          as<std::string>(items[3]), as<std::string>(items[4])};
}

Value to_value(const CountMessage& count) {
  return Tuple{{count.holder, count.change, count.session}};
}

CountMessage count_of(const Value& value) {
  const Values& items = items_of(value, 3);
  return {as<int64_t>(items[0]), as<int64_t>(items[1]), as<int64_t>(items[2])};
}

}  // namespace trireme::remote
