#include <trireme/bindings/python_values.h>

#include <trireme/comm/ref.h>
#include <trireme/common/error.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string_view>
#include <utility>

namespace trireme::values {
namespace {

namespace py = pybind11;

py::object* ref_type = nullptr;  // lives as long as the process

// The place of a value in its arguments; its text is made only for an error.
struct Place {
  const Place* outer = nullptr;
  const ValueOrigin* origin = nullptr;  // the outermost has one
  py::handle key = {};                  // in a dict
  Py_ssize_t index = -1;                // in a list or a tuple
  const char* part = nullptr;           // "a key of "

  std::string text() const {
    if (origin != nullptr) return origin->name;
    if (part != nullptr) return part + outer->text();
    if (!key) return outer->text() + "[" + std::to_string(index) + "]";
    return outer->text() + "[" + std::string(py::str(py::repr(key))) + "]";
  }
  const ValueOrigin& root() const { return origin != nullptr ? *origin : outer->root(); }
};

// Returns the argument that a place is in: "args[1]".
const Place& argument_of(const Place& place) {
  const bool is_inside = place.outer != nullptr && place.outer->outer != nullptr;
  return is_inside ? argument_of(*place.outer) : place;
}

std::string refusal(const Place& place, const std::string& what, const char* next_step) {
  return error_text(place.root().area,
                    "got a value that cannot be sent: " + place.text() + " is " + what,
                    place.root().where, next_step);
}

[[noreturn]] void refuse(const Place& place, py::handle object) {
  C10_THROW_ERROR(
      TypeError,
      refusal(place, "a " + std::string(Py_TYPE(object.ptr())->tp_name),
              "Send None, bool, int, float, complex, str, bytes, tensors, Refs in remote calls, "
              "and lists, tuples, sets and dicts of them."));
}

[[noreturn]] void refuse(const Place& place, const char* what) {
  C10_THROW_ERROR(ValueError, refusal(place, what, "Send it in another form."));
}

// Returns a LargeInt. A negative n takes as many bits as ~n, and one for the sign.
Value large_integer_of(const py::int_& number) {
  const auto bits = (number < py::int_(0) ? py::int_(~number) : number).attr("bit_length")();
  const auto bytes =
      number.attr("to_bytes")(bits.cast<int64_t>() / 8 + 1, "little", py::arg("signed") = true);
  return LargeInt{std::string(py::bytes(bytes))};
}

Value integer_of(py::handle object) {
  int overflow = 0;
  const auto number = static_cast<int64_t>(PyLong_AsLongLongAndOverflow(object.ptr(), &overflow));
  if (overflow != 0) return large_integer_of(py::reinterpret_borrow<py::int_>(object));
  return number;
}

py::object python_of_large(const LargeInt& number) {
  const auto type = py::type::of(py::int_(0));
  return type.attr("from_bytes")(py::bytes(number.bytes), "little", py::arg("signed") = true);
}

Value text_of(py::handle object, const Place& place) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    refuse(place, "a str that UTF-8 does not have");
  }
  return std::string(text, static_cast<size_t>(size));
}

// Returns whether an object may be a key of a dict.
bool is_plain(py::handle object) {
  PyObject* pointer = object.ptr();
  return pointer == Py_None || PyBool_Check(pointer) || PyLong_CheckExact(pointer) ||
         PyFloat_CheckExact(pointer) || PyComplex_CheckExact(pointer) ||
         PyUnicode_CheckExact(pointer) || PyBytes_CheckExact(pointer);
}

Value value_at(py::handle object, const Place& place);

// Throws for a container that is nested too deeply, or contains itself, before it is converted.
void check_depth(const Place& place) {
  int depth = 0;
  for (const Place* outer = &place; outer != nullptr; outer = outer->outer) ++depth;
  if (depth > kDeepest + 1) refuse(argument_of(place), "nested deeper than 100 levels");
}

Values items_of(py::handle sequence, const Place& place) {
  check_depth(place);
  Values items;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i)
    items.push_back(
        value_at(PySequence_Fast_GET_ITEM(sequence.ptr(), i), {&place, nullptr, {}, i}));
  return items;
}

Value key_of(py::handle object, const Place& place) {
  if (is_plain(object)) return value_at(object, place);
  if (!PyTuple_CheckExact(object.ptr())) refuse(place, object);
  Tuple tuple;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object.ptr()); ++i)
    tuple.items.push_back(key_of(PyTuple_GET_ITEM(object.ptr(), i), {&place, nullptr, {}, i}));
  return tuple;
}

Dict dict_of(py::handle object, const Place& place) {
  check_depth(place);
  Dict dict;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(object.ptr(), &position, &key, &item) != 0;) {
    dict.keys.push_back(key_of(key, {&place, nullptr, {}, -1, "a key of "}));
    dict.values.push_back(value_at(item, {&place, nullptr, key}));
  }
  return dict;
}

// Converts an OrderedDict in its own order, which differs from the dict's once items were moved.
Dict ordered_dict_of(py::handle object, const Place& place) {
  check_depth(place);
  Dict dict;
  for (py::handle pair : object.attr("items")()) {
    const auto [key, item] = pair.cast<std::pair<py::object, py::object>>();
    dict.keys.push_back(key_of(key, {&place, nullptr, {}, -1, "a key of "}));
    dict.values.push_back(value_at(item, {&place, nullptr, key}));
  }
  return dict;
}

Set set_of(py::handle object, const Place& place) {
  Set set;
  for (py::handle item : py::reinterpret_borrow<py::set>(object))
    set.items.push_back(key_of(item, {&place, nullptr, {}, -1, "an element of "}));
  return set;
}

Value value_at(py::handle object, const Place& place) {
  PyObject* pointer = object.ptr();
  if (THPVariable_Check(pointer)) return THPVariable_Unpack(pointer);
  if (pointer == Py_None) return {};
  if (PyBool_Check(pointer)) return pointer == Py_True;
  if (PyLong_CheckExact(pointer)) return integer_of(object);
  if (PyFloat_CheckExact(pointer)) return PyFloat_AS_DOUBLE(pointer);
  if (PyComplex_CheckExact(pointer))
    return Complex{PyComplex_RealAsDouble(pointer), PyComplex_ImagAsDouble(pointer)};
  if (PyUnicode_CheckExact(pointer)) return text_of(object, place);
  if (PyBytes_CheckExact(pointer))
    return Bytes{
        std::string(PyBytes_AS_STRING(pointer), static_cast<size_t>(PyBytes_GET_SIZE(pointer)))};
  if (PyTuple_CheckExact(pointer)) return Tuple{items_of(object, place)};
  if (PyList_CheckExact(pointer)) return List{items_of(object, place)};
  if (PyDict_CheckExact(pointer)) return dict_of(object, place);
  if (PyODict_CheckExact(pointer)) return ordered_dict_of(object, place);
  if (PySet_CheckExact(pointer)) return set_of(object, place);
  if (ref_type != nullptr && py::type::handle_of(object).is(*ref_type))
    return RefPtr(object.attr("_ref").cast<std::shared_ptr<Ref>>());
  refuse(place, object);
}

py::object tensor_of(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::list list_of(const Values& values) {
  py::list list(values.size());
  for (size_t i = 0; i < values.size(); ++i) list[i] = python_of(values[i]);
  return list;
}

py::object ref_of(const RefPtr& ref) {
  const auto held = std::const_pointer_cast<Ref>(ref);  // pybind11 has no pointers to const
  return ref_type == nullptr ? py::cast(held) : (*ref_type)(held);
}

}  // namespace

void use_ref_type(py::object type) {
  delete ref_type;
  ref_type = new py::object(std::move(type));
}

Value value_of_python(py::handle object, const ValueOrigin& origin) {
  return value_at(object, {nullptr, &origin});
}

Values values_of_python(const py::tuple& args, const ValueOrigin& origin) {
  return items_of(args, {nullptr, &origin});
}

Dict keywords_of_python(const py::dict& kwargs, const ValueOrigin& origin) {
  return dict_of(kwargs, {nullptr, &origin});
}

py::tuple python_of(const Values& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < values.size(); ++i) tuple[i] = python_of(values[i]);
  return tuple;
}

py::object python_of(const Value& value) {
  struct Visitor {
    py::object operator()(std::monostate) const { return py::none(); }
    py::object operator()(bool given) const { return py::bool_(given); }
    py::object operator()(int64_t given) const { return py::int_(given); }
    py::object operator()(double given) const { return py::float_(given); }
    py::object operator()(const LargeInt& given) const { return python_of_large(given); }
    py::object operator()(const Complex& given) const {
      return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(given.real, given.imag));
    }
    py::object operator()(const std::string& given) const { return py::str(given); }
    py::object operator()(const Bytes& given) const { return py::bytes(given.bytes); }
    py::object operator()(const at::Tensor& given) const { return tensor_of(given); }
    py::object operator()(const RefPtr& given) const { return ref_of(given); }
    py::object operator()(const List& given) const { return list_of(given.items); }
    py::object operator()(const Tuple& given) const { return python_of(given.items); }
    py::object operator()(const Set& given) const {
      py::set set;
      for (const Value& item : given.items) set.add(python_of(item));
      return set;
    }
    py::object operator()(const Dict& given) const {
      py::dict dict;
      for (size_t i = 0; i < given.keys.size(); ++i)
        dict[python_of(given.keys[i])] = python_of(given.values[i]);
      return dict;
    }
  };
  return std::visit(Visitor(), value.content);
}

}  // namespace trireme::values
