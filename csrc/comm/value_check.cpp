#include <trireme/comm/value_check.h>

#include <trireme/comm/tensor_packing.h>
#include <trireme/comm/value_codec.h>
#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <string>

namespace trireme::values {
namespace {

// The place of a value. It is put into words only for an error.
struct Place {
  const Place* outer = nullptr;
  const ValueOrigin* origin = nullptr;  // set for the outermost place
  const Value* key = nullptr;           // in a dict
  size_t index = 0;                     // in a list or a tuple
  const char* part = nullptr;           // "a key of "

  std::string text() const;
  const ValueOrigin& root() const { return origin != nullptr ? *origin : outer->root(); }
};

std::string text_of_key(const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return "'" + *text + "'";
  if (const auto* number = key.get_if<int64_t>()) return std::to_string(*number);
  if (const auto* is_true = key.get_if<bool>()) return *is_true ? "True" : "False";
  return kind_of(key);
}

std::string Place::text() const {
  if (origin != nullptr) return origin->name;
  if (part != nullptr) return part + outer->text();
  return outer->text() + "[" + (key != nullptr ? text_of_key(*key) : std::to_string(index)) + "]";
}

std::string refusal(const Place& place, const std::string& what, const char* next_step) {
  return error_text(place.root().area,
                    "got a value that cannot be sent: " + place.text() + " " + what,
                    place.root().where, next_step);
}

[[noreturn]] void refuse_type(const Place& place, const std::string& what, const char* next_step) {
  C10_THROW_ERROR(TypeError, refusal(place, what, next_step));
}

[[noreturn]] void refuse_value(const Place& place, const std::string& what) {
  C10_THROW_ERROR(ValueError, refusal(place, what, "Send it in another form."));
}

// Returns the argument that a place is in: "args[1]".
const Place& argument_of(const Place& place) {
  const bool is_inside = place.outer != nullptr && place.outer->outer != nullptr;
  return is_inside ? argument_of(*place.outer) : place;
}

class Check {
 public:
  explicit Check(bool reaches_devices) : reaches_devices_(reaches_devices) {}

  void value(const Value& value, const Place& place) {
    if (const auto* tensor = value.get_if<at::Tensor>()) return check(*tensor, place);
    if (const auto* text = value.get_if<std::string>()) return check(*text, place);
    if (const auto* ref = value.get_if<RefPtr>(); ref != nullptr && !*ref)
      refuse_type(place, "is a Ref of nothing", "Send None in its place.");
    if (const auto* list = value.get_if<List>()) return items(list->items, place);
    if (const auto* tuple = value.get_if<Tuple>()) return items(tuple->items, place);
    if (const auto* dict = value.get_if<Dict>()) return pairs(*dict, place);
    if (const auto* set = value.get_if<Set>())
      for (const Value& item : set->items)
        key(item, {&place, nullptr, nullptr, 0, "an element of "});
  }
  void items(const Values& items, const Place& place) {
    enter(place);
    for (size_t i = 0; i < items.size(); ++i) value(items[i], {&place, nullptr, nullptr, i});
    --depth_;
  }
  void pairs(const Dict& dict, const Place& place) {
    enter(place);
    if (dict.keys.size() != dict.values.size())
      refuse_value(place, "is a dict of " + std::to_string(dict.keys.size()) + " keys and " +
                              std::to_string(dict.values.size()) + " values");
    for (size_t i = 0; i < dict.keys.size(); ++i) {
      key(dict.keys[i], {&place, nullptr, nullptr, 0, "a key of "});
      value(dict.values[i], {&place, nullptr, &dict.keys[i]});
    }
    --depth_;
  }

 private:
  void key(const Value& key, const Place& place) {
    const bool is_none = key.is<at::Tensor>() || key.is<RefPtr>() || key.is<List>() ||
                         key.is<Set>() || key.is<Dict>();
    if (is_none)
      refuse_type(place, std::string("is ") + kind_of(key),
                  "Send it as a value of a dict, or in a list.");
    if (const auto* text = key.get_if<std::string>()) check(*text, place);
    if (const auto* tuple = key.get_if<Tuple>()) {
      enter(place);
      for (const Value& item : tuple->items) this->key(item, place);
      --depth_;
    }
  }
  void check(const std::string& text, const Place& place) const {
    if (!is_utf8(text)) refuse_value(place, "is a text that is not UTF-8");
  }
  void check(const at::Tensor& tensor, const Place& place) const {
    if (!tensor.defined()) refuse_type(place, "is an undefined Tensor", "Send None in its place.");
    std::string why = why_not_sent(tensor);
    if (why.empty() && !tensor.is_cpu() && !reaches_devices_)
      why = "is on " + tensor.device().str() + ", but goes through the memory of the host";
    if (!why.empty())
      refuse_type(place, "is a Tensor that " + why, "Send a dense tensor with memory of its own.");
  }
  void enter(const Place& place) {
    if (++depth_ > kDeepest)
      refuse_value(argument_of(place),
                   "is nested deeper than " + std::to_string(kDeepest) + " levels");
  }

  bool reaches_devices_;
  int depth_ = 0;
};

}  // namespace

void check_value(const Value& value, const ValueOrigin& origin, bool reaches_devices) {
  Check(reaches_devices).value(value, {nullptr, &origin});
}

void check_items(const Values& items, const ValueOrigin& origin, bool reaches_devices) {
  Check(reaches_devices).items(items, {nullptr, &origin});
}

void check_pairs(const Dict& dict, const ValueOrigin& origin, bool reaches_devices) {
  Check(reaches_devices).pairs(dict, {nullptr, &origin});
}

}  // namespace trireme::values
