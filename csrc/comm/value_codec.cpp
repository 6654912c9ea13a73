#include <trireme/comm/value_codec.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace trireme::values {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers travel as they lie in memory");

// These are the first bytes of values.
enum class ByteKind : uint8_t {
  kNone,
  kFalse,
  kTrue,
  kInt,
  kDouble,
  kText,
  kBytes,
  kTensor,
  kRef,
  kList,
  kTuple,
  kSet,
  kDict,
  kLargeInt,
  kComplex,
};

// Memory for a few items is taken at once; more only as they are read, since a count may be false.
constexpr uint64_t kItemsAtOnce = 8;
constexpr size_t kUsualBytes = 128;
constexpr const char* kValuesArea = "values";
constexpr const char* kKeys = "None, a bool, a number, a str, bytes or a tuple of such";

// Returns how many bytes the first character takes; 0 if it is invalid.
size_t length_of_first(const unsigned char* bytes, size_t left) {
  const unsigned char lead = bytes[0];
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || length > left) return 0;
  // The second byte shows overlong forms, surrogates, and what lies beyond the last character.
  const unsigned char least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (bytes[1] < least || bytes[1] > most) return 0;
  for (size_t i = 2; i < length; ++i)
    if ((bytes[i] & 0xc0) != 0x80) return 0;
  return length;
}

[[noreturn]] void refuse_to_write(const std::string& what, const char* next_step) {
  C10_THROW_ERROR(ValueError, error_text(kValuesArea, "got " + what, {}, next_step));
}

[[noreturn]] void refuse_type(const std::string& what, const char* next_step) {
  C10_THROW_ERROR(TypeError, error_text(kValuesArea, "got " + what, {}, next_step));
}

[[noreturn]] void refuse_bytes(const std::string& what) {
  C10_THROW_ERROR(ValueError, error_text(kValuesArea, "got a message whose value " + what, {},
                                         "Run the same Trireme on every rank."));
}

class ValueWriter {
 public:
  ValueWriter(EncodedValue& out, const AddressOf& address_of)
      : out_(out), address_of_(address_of) {}

  void write(const Value& value) {
    std::visit([this](const auto& content) { put(content); }, value.content);
  }

 private:
  void put(std::monostate) { put_kind(ByteKind::kNone); }
  void put(bool is_true) { put_kind(is_true ? ByteKind::kTrue : ByteKind::kFalse); }
  void put(int64_t number) {
    put_kind(ByteKind::kInt);
    put_number(number);
  }
  void put(double number) {
    put_kind(ByteKind::kDouble);
    put_number(number);
  }
  void put(const LargeInt& number) {
    if (!is_large_int(number.bytes))
      refuse_to_write("a LargeInt that takes fewer bytes", "Send it as an integer of 64 bits.");
    put_kind(ByteKind::kLargeInt);
    put_sized(number.bytes);
  }
  void put(const Complex& number) {
    put_kind(ByteKind::kComplex);
    put_number(number.real);
    put_number(number.imag);
  }
  void put(const std::string& text) {
    put_kind(ByteKind::kText);
    put_text(text);
  }
  void put(const Bytes& bytes) {
    put_kind(ByteKind::kBytes);
    put_sized(bytes.bytes);
  }
  void put(const at::Tensor& tensor) {
    expect_no_key("a Tensor");
    if (!tensor.defined()) refuse_type("an undefined Tensor", "Send None in its place.");
    put_kind(ByteKind::kTensor);
    out_.tensors.push_back(tensor);
  }
  void put(const RefPtr& ref) {
    expect_no_key("a Ref");
    if (!ref) refuse_type("a Ref of nothing", "Send None in its place.");
    put_kind(ByteKind::kRef);
    const RefAddress address = address_of_(*ref);
    put_number(address.owner);
    put_number(address.session);
    put_number(address.number);
    put_text(address.class_name);
    out_.refs.push_back(ref);
  }
  void put(const List& list) {
    expect_no_key("a list");
    open(ByteKind::kList, list.items.size());
    for (const Value& item : list.items) write(item);
    --depth_;
  }
  void put(const Tuple& tuple) {
    open(ByteKind::kTuple, tuple.items.size());
    for (const Value& item : tuple.items) write(item);
    --depth_;
  }
  void put(const Set& set) {
    expect_no_key("a set");
    open(ByteKind::kSet, set.items.size());
    for (const Value& item : set.items) write_key(item);
    --depth_;
  }
  void put(const Dict& dict) {
    expect_no_key("a dict");
    if (dict.keys.size() != dict.values.size())
      refuse_to_write("a dict of " + std::to_string(dict.keys.size()) + " keys and " +
                          std::to_string(dict.values.size()) + " values",
                      "Give each key one value.");
    open(ByteKind::kDict, dict.keys.size());
    for (size_t i = 0; i < dict.keys.size(); ++i) {
      write_key(dict.keys[i]);
      write(dict.values[i]);
    }
    --depth_;
  }

  void write_key(const Value& key) {
    is_in_key_ = true;  // was false: a value that holds keys is no key
    write(key);
    is_in_key_ = false;
  }
  void expect_no_key(const char* what) const {
    if (is_in_key_)
      refuse_type(std::string(what) + " as a key of a dict or an item of a set, expected " + kKeys,
                  "Send it as a value of a dict, or in a list.");
  }
  void open(ByteKind kind, size_t count) {
    if (++depth_ > kDeepest)
      refuse_to_write("a value that is nested deeper than " + std::to_string(kDeepest) + " levels",
                      "Send it in a flatter form.");
    put_kind(kind);
    put_number(uint64_t{count});
  }
  void put_text(const std::string& text) {
    if (!is_utf8(text)) refuse_to_write("a text that is not UTF-8", "Send it as bytes.");
    put_sized(text);
  }
  void put_sized(const std::string& bytes) {
    put_number(uint64_t{bytes.size()});
    out_.text.append(bytes);
  }
  void put_kind(ByteKind kind) { out_.text.push_back(static_cast<char>(kind)); }
  void put_number(auto number) {
    static_assert(sizeof(number) == 8);
    std::array<char, 8> bytes;
    std::memcpy(bytes.data(), &number, bytes.size());
    out_.text.append(bytes.data(), bytes.size());
  }

  EncodedValue& out_;
  const AddressOf& address_of_;
  int depth_ = 0;
  bool is_in_key_ = false;
};

class ValueReader {
 public:
  ValueReader(std::string_view left, const std::vector<at::Tensor>& tensors, const AdoptRef& adopt)
      : left_(left), tensors_(tensors), adopt_(adopt) {}

  // Reads into a value that is None.
  void read(Value& value) {
    if (left_.empty()) refuse_bytes("ends too early");
    const auto kind = static_cast<ByteKind>(left_.front());
    left_.remove_prefix(1);
    auto& content = value.content;
    switch (kind) {
      case ByteKind::kNone:
        return;
      case ByteKind::kFalse:
      case ByteKind::kTrue:
        content = kind == ByteKind::kTrue;
        return;
      case ByteKind::kInt:
        content = take_number<int64_t>();
        return;
      case ByteKind::kDouble:
        content = take_number<double>();
        return;
      case ByteKind::kText:
        content.emplace<std::string>(take_text());
        return;
      case ByteKind::kBytes:
        content.emplace<Bytes>().bytes = take_sized();
        return;
      case ByteKind::kLargeInt:
        content.emplace<LargeInt>().bytes = take_large_int();
        return;
      case ByteKind::kComplex:
        return read_complex(content.emplace<Complex>());
      case ByteKind::kTuple:
        return read_items(content.emplace<Tuple>().items);
      case ByteKind::kTensor:
      case ByteKind::kRef:
      case ByteKind::kList:
      case ByteKind::kSet:
      case ByteKind::kDict:
        return read_no_key(kind, content);
    }
    refuse_bytes("is of the unknown kind " + std::to_string(static_cast<int>(kind)));
  }

  void expect_end() const {
    if (!left_.empty()) refuse_bytes("ends before its bytes do");
    if (next_tensor_ != tensors_.size()) refuse_bytes("has no place for a tensor");
  }

 private:
  void read_no_key(ByteKind kind, Value::Content& content) {
    if (is_in_key_) refuse_bytes("has a key that is none");
    if (kind == ByteKind::kTensor) {
      content = take_tensor();
    } else if (kind == ByteKind::kRef) {
      content = take_ref();
    } else if (kind == ByteKind::kList) {
      read_items(content.emplace<List>().items);
    } else if (kind == ByteKind::kSet) {
      read_set(content.emplace<Set>());
    } else {
      read_dict(content.emplace<Dict>());
    }
  }
  void read_complex(Complex& number) {
    number.real = take_number<double>();
    number.imag = take_number<double>();
  }
  void read_items(Values& items) {
    const uint64_t count = open(1);
    items.reserve(std::min(count, kItemsAtOnce));
    for (uint64_t i = 0; i < count; ++i) read(items.emplace_back());
    --depth_;
  }
  void read_set(Set& set) {
    const uint64_t count = open(1);
    set.items.reserve(std::min(count, kItemsAtOnce));
    for (uint64_t i = 0; i < count; ++i) read_key(set.items.emplace_back());
    --depth_;
  }
  void read_dict(Dict& dict) {
    const uint64_t count = open(2);
    dict.keys.reserve(std::min(count, kItemsAtOnce));
    dict.values.reserve(std::min(count, kItemsAtOnce));
    for (uint64_t i = 0; i < count; ++i) {
      read_key(dict.keys.emplace_back());
      read(dict.values.emplace_back());
    }
    --depth_;
  }
  void read_key(Value& key) {
    is_in_key_ = true;
    read(key);
    is_in_key_ = false;
  }

  // Returns a count of items that take at least `least_bytes` each.
  uint64_t open(uint64_t least_bytes) {
    if (++depth_ > kDeepest)
      refuse_bytes("is nested deeper than " + std::to_string(kDeepest) + " levels");
    const auto count = take_number<uint64_t>();
    if (count > left_.size() / least_bytes) refuse_bytes("has a count beyond its bytes");
    return count;
  }
  template <typename T>
  T take_number() {
    static_assert(sizeof(T) == 8);
    T number;
    if (left_.size() < sizeof(number)) refuse_bytes("ends too early");
    std::memcpy(&number, left_.data(), sizeof(number));
    left_.remove_prefix(sizeof(number));
    return number;
  }
  std::string_view take_sized() {
    const auto length = take_number<uint64_t>();
    if (length > left_.size()) refuse_bytes("has a length beyond its bytes");
    const std::string_view bytes = left_.substr(0, length);
    left_.remove_prefix(length);
    return bytes;
  }
  std::string_view take_text() {
    const std::string_view text = take_sized();
    if (!is_utf8(text)) refuse_bytes("has a text that is not UTF-8");
    return text;
  }
  std::string_view take_large_int() {
    const std::string_view bytes = take_sized();
    if (!is_large_int(bytes)) refuse_bytes("has an integer in a long form");
    return bytes;
  }
  const at::Tensor& take_tensor() {
    if (next_tensor_ == tensors_.size()) refuse_bytes("names a tensor that has not come");
    const at::Tensor& tensor = tensors_[next_tensor_++];
    if (!tensor.defined()) refuse_bytes("names an undefined tensor");
    return tensor;
  }
  RefPtr take_ref() {
    RefAddress address;
    address.owner = take_number<int64_t>();
    address.session = take_number<int64_t>();
    address.number = take_number<int64_t>();
    address.class_name = take_text();
    return adopt_(address);
  }

  std::string_view left_;
  const std::vector<at::Tensor>& tensors_;
  const AdoptRef& adopt_;
  size_t next_tensor_ = 0;
  int depth_ = 0;
  bool is_in_key_ = false;
};

}  // namespace

const char* kind_of(const Value& value) {
  // Stands in the order of Value::Content.
  constexpr std::array<const char*, 14> kKinds{"None",
                                               "a bool",
                                               "an int",
                                               "a float",
                                               "a str",
                                               "bytes",
                                               "a Tensor",
                                               "a Ref",
                                               "a list",
                                               "a tuple",
                                               "a set",
                                               "a dict",
                                               "an int of more than 64 bits",
                                               "a complex"};
  static_assert(kKinds.size() == std::variant_size_v<Value::Content>);
  return kKinds.at(value.content.index());
}

bool is_large_int(std::string_view bytes) {
  if (bytes.size() <= sizeof(int64_t)) return false;
  const auto last = static_cast<signed char>(bytes.back());
  const auto before = static_cast<signed char>(bytes[bytes.size() - 2]);
  const bool only_repeats_sign = (last == 0 && before >= 0) || (last == -1 && before < 0);
  return !only_repeats_sign;
}

bool is_utf8(std::string_view bytes) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  const auto* next = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t left = bytes.size();
  while (left > 0) {
    uint64_t eight = kHighBits;
    if (left >= sizeof(eight)) std::memcpy(&eight, next, sizeof(eight));
    const size_t length = (eight & kHighBits) == 0 ? sizeof(eight) : length_of_first(next, left);
    if (length == 0) return false;
    next += length;
    left -= length;
  }
  return true;
}

EncodedValue encode(const Value& value, const AddressOf& address_of) {
  EncodedValue encoded;
  encoded.text.reserve(kUsualBytes);
  ValueWriter(encoded, address_of).write(value);
  return encoded;
}

Value decode(std::string_view text, const std::vector<at::Tensor>& tensors, const AdoptRef& adopt) {
  ValueReader reader(text, tensors, adopt);
  Value value;
  reader.read(value);
  reader.expect_end();
  return value;
}

}  // namespace trireme::values
