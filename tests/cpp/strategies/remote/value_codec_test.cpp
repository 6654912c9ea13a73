// Values and messages as bytes: there and back, and whatever is no such bytes.

#include <trireme/strategies/remote/typed_values.h>
#include <trireme/strategies/remote/value.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <catch_torch.h>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <sys/resource.h>
#include <unistd.h>

namespace trireme::value_codec_test {

using namespace trireme::remote;
using trireme::test::error_of;

namespace {

using Tensors = std::vector<at::Tensor>;
using std::string;

RefPtr adopt(const RefAddress& address) { return std::make_shared<const Ref>(address, nullptr); }
RefAddress address_of(const Ref& ref) { return ref.address(); }
EncodedValue written(const Value& value) { return encode(value, address_of); }
Value read(const EncodedValue& encoded) { return decode(encoded.text, encoded.tensors, adopt); }
Value read_bytes(std::string_view bytes) { return decode(bytes, {}, adopt); }
string said_of(std::string_view bytes) {
  return error_of<c10::ValueError>([&] { read_bytes(bytes); });
}

string raw(const auto&... values) {
  string bytes;
  (bytes.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  return bytes;
}
// A value of this kind with a length or a count.
string sized(uint8_t kind, uint64_t count) { return raw(kind, count); }

bool is_same(const Value& a, const Value& b);
bool is_same(const Values& a, const Values& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Value& one, const Value& other) { return is_same(one, other); });
}
bool is_same(std::monostate, std::monostate) { return true; }
bool is_same(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }
bool is_same(const Bytes& a, const Bytes& b) { return a.bytes == b.bytes; }
bool is_same(const LargeInt& a, const LargeInt& b) { return a.bytes == b.bytes; }
bool is_same(const Complex& a, const Complex& b) {
  return is_same(a.real, b.real) && is_same(a.imag, b.imag);
}
bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }
bool is_same(const RefPtr& a, const RefPtr& b) { return a->address() == b->address(); }
bool is_same(const List& a, const List& b) { return is_same(a.items, b.items); }
bool is_same(const Tuple& a, const Tuple& b) { return is_same(a.items, b.items); }
bool is_same(const Set& a, const Set& b) { return is_same(a.items, b.items); }
bool is_same(const Dict& a, const Dict& b) {
  return is_same(a.keys, b.keys) && is_same(a.values, b.values);
}
template <typename T>
  requires(std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, string>)
bool is_same(const T& a, const T& b) {
  return a == b;
}
bool is_same(const Value& a, const Value& b) {
  return std::visit(
      [](const auto& one, const auto& other) {
        if constexpr (std::is_same_v<decltype(one), decltype(other)>) return is_same(one, other);
        return false;
      },
      a.content, b.content);
}

RefPtr ref(int64_t number, const char* class_name = "Observer") {
  return adopt({1, -7, number, class_name});
}

// Holds each kind, and keys of each kind that can be one.
Value rich_value() {
  Dict dict;
  dict.keys = {Value(),
               true,
               int64_t{-1},
               2.5,
               string("k\xc3\xa4"),
               Bytes{"\xff"},
               LargeInt{string(8, '\xff') + '\1'},
               Complex{0.5, -2},
               Tuple{{int64_t{1}, Tuple{{string("a"), Value()}}}}};
  dict.values = {at::ones({3}),
                 ref(4),
                 List{{false, Value()}},
                 Set{{int64_t{3}, Tuple()}},
                 Dict(),
                 Complex{-0.0, 1},
                 LargeInt{string(8, '\0') + '\x80'},
                 Tuple{{at::zeros({2}), ref(5, "Counter")}},
                 string(30, 'x')};
  return List{{std::move(dict), Bytes{string(20, '\0')}, string(), Bytes(), List(), Tuple(), Set(),
               std::numeric_limits<int64_t>::min()}};
}

template <typename Container = List>
Value nested(int levels, Value value = {}) {
  for (int i = 0; i < levels; ++i) value = Container{{std::move(value)}};
  return value;
}

string nested_bytes(int levels, uint8_t kind = 9) {
  string bytes;
  for (int i = 0; i < levels; ++i) bytes += sized(kind, 1);
  return bytes + '\0';
}

// Lets this process take little more memory than it has.
class LittleMemory {
 public:
  explicit LittleMemory(rlim_t more) {
    ::getrlimit(RLIMIT_AS, &before_);
    std::ifstream file("/proc/self/statm");
    rlim_t pages = 0;
    file >> pages;
    rlimit limit = before_;
    limit.rlim_cur = std::min(before_.rlim_max, pages * ::sysconf(_SC_PAGESIZE) + more);
    ::setrlimit(RLIMIT_AS, &limit);
  }
  ~LittleMemory() { ::setrlimit(RLIMIT_AS, &before_); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace

TEST_CASE("each kind of value comes back as it was, under its name") {
  using Limits = std::numeric_limits<double>;
  const std::vector<std::pair<Value, string>> cases{
      {Value(), "None"},
      {false, "a bool"},
      {true, "a bool"},
      {int64_t{0}, "an int"},
      {std::numeric_limits<int64_t>::max(), "an int"},
      {std::numeric_limits<int64_t>::min(), "an int"},
      {0.1, "a float"},
      {-0.0, "a float"},
      {Limits::infinity(), "a float"},
      {Limits::signaling_NaN(), "a float"},
      {string(), "a str"},
      {string("a\0\xf0\x9f\x98\x80", 6), "a str"},
      {Bytes{"\xff\xfe"}, "bytes"},
      {LargeInt{string(9, '\x7f')}, "an int of more than 64 bits"},
      {Complex{-0.0, Limits::infinity()}, "a complex"},
      {at::ones({2}), "a Tensor"},
      {ref(3), "a Ref"},
      {ref(-1, ""), "a Ref"},
      {List{{int64_t{1}, string("a")}}, "a list"},
      {Tuple{{List(), Tuple()}}, "a tuple"},
      {Set{{Value(), Tuple{{0.5}}}}, "a set"},
      {Dict(), "a dict"},
      {rich_value(), "a list"},
      {List{Values(1000, string("many"))}, "a list"}};
  for (const auto& [value, name] : cases) {
    INFO(name);
    const Value back = read(written(value));
    CHECK(is_same(back, value));
    CHECK(kind_of(back) == name);
  }
}

TEST_CASE("the bytes are those that the note describes") {
  const auto bytes_of = [](const Value& value) { return written(value).text; };
  const auto with_zeros = [](string bytes) { return bytes + string(7, '\0'); };
  CHECK(bytes_of(Value()) == string(1, '\0'));
  CHECK(bytes_of(true) == "\x02");
  CHECK(bytes_of(int64_t{5}) == with_zeros("\x03\x05"));
  CHECK(bytes_of(1.0) == "\x04" + string(6, '\0') + "\xf0\x3f");
  CHECK(bytes_of(string("ab")) == with_zeros("\x05\x02") + "ab");
  CHECK(bytes_of(Bytes{"\xff"}) == with_zeros("\x06\x01") + "\xff");
  CHECK(bytes_of(List{{at::ones({1}), false}}) == with_zeros("\x09\x02") + "\x07\x01");
  CHECK(bytes_of(Set{{false}}) == with_zeros("\x0b\x01") + "\x01");
  CHECK(bytes_of(LargeInt{string(9, '\x01')}) == with_zeros("\x0d\x09") + string(9, '\x01'));
  CHECK(bytes_of(Complex{1.0, 0.0}) == "\x0e" + string(6, '\0') + "\xf0\x3f" + string(8, '\0'));
  Dict dict;
  dict.keys = {false};
  dict.values = {true};
  CHECK(bytes_of(dict) == with_zeros("\x0c\x01") + "\x01\x02");
  CHECK(bytes_of(ref(3, "A")) ==
        "\x08" + raw(int64_t{1}, int64_t{-7}, int64_t{3}, uint64_t{1}) + "A");
}

TEST_CASE("tensors and Refs come in the order in which they were met") {
  const Tensors tensors{at::ones({1}), at::ones({2}), at::ones({3})};
  Dict dict;
  dict.keys = {string("a"), string("b")};
  dict.values = {tensors[0], List{{ref(0), tensors[1]}}};
  const EncodedValue encoded = written(Tuple{{dict, ref(1), tensors[2], tensors[0]}});
  REQUIRE(encoded.tensors.size() == 4);
  for (size_t i = 0; i < 4; ++i) CHECK(encoded.tensors[i].is_same(tensors[i % 3]));
  REQUIRE(encoded.refs.size() == 2);
  std::vector<int64_t> adopted;
  decode(encoded.text, encoded.tensors, [&](const RefAddress& address) {
    adopted.push_back(address.number);
    return adopt(address);
  });
  CHECK(adopted == std::vector<int64_t>{0, 1});
  CHECK(encoded.refs[1]->address().number == 1);
  const auto refuse = [](const RefAddress&) -> RefPtr { throw std::runtime_error("not this one"); };
  CHECK_THROWS_WITH(decode(encoded.text, encoded.tensors, refuse), "not this one");
}

TEST_CASE("a hundred levels are understood, and no more") {
  const auto said = [](const Value& value) {
    return error_of<c10::ValueError>([&] { written(value); });
  };
  for (const Value& value : {nested(kDeepest), nested<Tuple>(kDeepest), nested<Set>(1, 0.5),
                             nested(1, nested<Set>(1, nested<Tuple>(kDeepest - 2)))})
    CHECK(is_same(read(written(value)), value));
  for (const Value& value : {nested(kDeepest + 1), nested<Tuple>(kDeepest + 1), nested(2000),
                             nested(1, nested<Set>(1, nested<Tuple>(kDeepest - 1)))})
    CHECK_THAT(said(value), Catch::Contains("[values] got a value that is nested deeper than 100"));
  // Levels do not add up side by side.
  CHECK_NOTHROW(written(List{Values(300, nested(kDeepest - 1))}));

  CHECK_NOTHROW(read_bytes(nested_bytes(kDeepest)));
  CHECK_THAT(said_of(nested_bytes(kDeepest + 1)), Catch::Contains("is nested deeper than 100"));
  CHECK_THAT(said_of(nested_bytes(100'000)), Catch::Contains("is nested deeper than 100"));
  CHECK_THAT(said_of(nested_bytes(100'000, 10)), Catch::Contains("is nested deeper than 100"));
  CHECK_THAT(said_of(sized(11, 1) + nested_bytes(100'000, 10)),
             Catch::Contains("is nested deeper than 100"));
}

TEST_CASE("values that cannot be sent are refused by the kind of their mistake") {
  const auto as_key = [](Value key) {
    Dict dict;
    dict.keys = {std::move(key)};
    dict.values = {Value()};
    return Value(std::move(dict));
  };
  const std::vector<std::pair<Value, string>> no_keys{{List(), "a list"},
                                                      {Dict(), "a dict"},
                                                      {Set(), "a set"},
                                                      {ref(1), "a Ref"},
                                                      {at::ones({1}), "a Tensor"}};
  for (const auto& [key, name] : no_keys) {
    const Value in_tuple = Tuple{{string("a"), Tuple{{key}}}};
    for (const Value& value : {as_key(key), Value(Set{{key}}), as_key(in_tuple)})
      CHECK_THAT(
          error_of<c10::TypeError>([&] { written(value); }),
          Catch::Contains("[values] got " + name + " as a key of a dict or an item of a set"));
    CHECK_NOTHROW(written(List{{as_key(string("a")), key}}));
  }
  CHECK_THAT(error_of<c10::TypeError>([] { written(List{{at::Tensor()}}); }),
             Catch::Contains("got an undefined Tensor"));
  CHECK_THAT(error_of<c10::TypeError>([] { written(RefPtr()); }),
             Catch::Contains("got a Ref of nothing"));
  Dict lopsided;
  lopsided.keys = {true, false};
  lopsided.values = {true};
  CHECK_THAT(error_of<c10::ValueError>([&] { written(lopsided); }),
             Catch::Contains("got a dict of 2 keys and 1 values"));
  for (const Value& value : {Value(string("\xff")), Value(ref(1, "\xed\xa0\x80"))})
    CHECK_THAT(error_of<c10::ValueError>([&] { written(value); }),
               Catch::Contains("got a text that is not UTF-8"));
}

TEST_CASE("an integer has one form, and C++ types hold none of more than 64 bits") {
  for (const string& bytes : {string(), string(8, '\1'), string(9, '\0'), string(9, '\xff')})
    CHECK_THAT(error_of<c10::ValueError>([&] { written(LargeInt{bytes}); }),
               Catch::Contains("got a LargeInt that takes fewer bytes"));
  for (const string& bytes : {string(8, '\0') + '\1', string(8, '\xff') + '\0',
                              string(8, '\0') + '\xff', string(20, '\x55')})
    CHECK_NOTHROW(written(LargeInt{bytes}));
  CHECK_THAT(
      error_of<c10::TypeError>([] { value_as<int64_t>(LargeInt{string(9, '\1')}, "args[0]"); }),
      Catch::Contains("args[0] is an int of more than 64 bits, expected an int"));
}

TEST_CASE("bytes that are no value say what is wrong with them") {
  const string number(8, '\1');
  const string key = sized(12, 1);
  const std::vector<std::pair<string, string>> cases{
      {"", "ends too early"},
      {"\x03" + number.substr(1), "ends too early"},
      {"\x05" + number.substr(1), "ends too early"},
      {sized(5, 3) + "ab", "has a length beyond its bytes"},
      {sized(6, ~uint64_t{0}) + "ab", "has a length beyond its bytes"},
      {sized(5, 1) + "\xff", "has a text that is not UTF-8"},
      {"\x08" + number + number + number + raw(uint64_t{1}) + "\xff",
       "has a text that is not UTF-8"},
      {"\x08" + number + number, "ends too early"},
      {sized(9, 3) + string(2, '\0'), "has a count beyond its bytes"},
      {sized(12, 2) + string(3, '\0'), "has a count beyond its bytes"},
      {sized(12, uint64_t{1} << 63) + string(8, '\0'), "has a count beyond its bytes"},
      {"\x0d", "ends too early"},
      {sized(13, 8) + string(8, '\1'), "has an integer in a long form"},
      {sized(13, 9) + string(9, '\0'), "has an integer in a long form"},
      {sized(13, 9) + string(9, '\xff'), "has an integer in a long form"},
      {"\x0e" + number, "ends too early"},
      {"\x0f", "is of the unknown kind 15"},
      {"\xff", "is of the unknown kind 255"},
      {string(2, '\0'), "ends before its bytes do"},
      {"\x07", "names a tensor that has not come"},
      {key + sized(9, 0) + '\0', "has a key that is none"},
      {sized(11, 1) + "\x07", "has a key that is none"},
      {key + sized(10, 1) + sized(11, 0) + '\0', "has a key that is none"}};
  for (const auto& [bytes, expected] : cases)
    CHECK_THAT(said_of(bytes), Catch::Contains("[values] got a message whose value " + expected));
  const auto with_tensors = [](const string& bytes, const Tensors& tensors) {
    return error_of<c10::ValueError>([&] { decode(bytes, tensors, adopt); });
  };
  CHECK_THAT(with_tensors("\x07", {at::ones({1}), at::ones({1})}),
             Catch::Contains("has no place for a tensor"));
  CHECK_THAT(with_tensors("\x07", {at::Tensor()}), Catch::Contains("names an undefined tensor"));
}

TEST_CASE("a value with one byte changed, or cut off, is another value or none") {
  const EncodedValue encoded = written(rich_value());
  int64_t refused = 0;
  const auto try_out = [&](const string& bytes) {
    try {
      const Value value = decode(bytes, encoded.tensors, adopt);
      return written(value).text == bytes;
    } catch (const c10::ValueError&) {
      ++refused;
      return true;
    }
  };
  int64_t wrong = 0;
  for (size_t length = 0; length < encoded.text.size(); ++length)
    wrong += !try_out(encoded.text.substr(0, length));
  CHECK(refused == static_cast<int64_t>(encoded.text.size()));
  for (size_t i = 0; i < encoded.text.size(); ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      string bytes = encoded.text;
      bytes[i] = static_cast<char>(byte);
      wrong += !try_out(bytes);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a count takes no memory before its values were read") {
  constexpr size_t kBytes = size_t{24} << 20;  // values of so many bytes would take a gigabyte
  string error;
  for (const uint8_t kind : std::initializer_list<uint8_t>{9, 10, 11, 12}) {
    const string bytes = sized(kind, kBytes / 2) + string(kBytes, '\xff');
    const string huge = sized(kind, uint64_t{1} << 62) + string(64, '\0');
    const string deep = nested_bytes(50).substr(0, 49 * 9) + bytes;
    const LittleMemory little(rlim_t{256} << 20);
    for (const string* text : {&bytes, &huge, &deep}) {
      try {
        read_bytes(*text);
        error = "was read";
      } catch (const c10::ValueError&) {
      } catch (const std::bad_alloc&) {
        error = "took memory";
      }
    }
  }
  CHECK(error.empty());
}

TEST_CASE("what is UTF-8 is what Python takes for it") {
  for (const char* text :
       {"", "a", "eight by", "nine byte", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80",
        "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf",
        "seven b\xc3\xa4 and more", "\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f\xe2\x82\xac"})
    CHECK(is_utf8(text));
  CHECK(is_utf8(std::string_view()));
  CHECK(is_utf8(std::string_view("\0\0", 2)));
  for (const char* text : {"\x80",
                           "\xbf",
                           "\xc0\x80",
                           "\xc1\xbf",
                           "\xc2",
                           "\xc2g",
                           "\xc2\xc2",
                           "\xe0\x80\x80",
                           "\xe0\x9f\xbf",
                           "\xed\xa0\x80",
                           "\xed\xbf\xbf",
                           "\xe2\x82",
                           "\xe2\x82g",
                           "\xf0\x80\x80\x80",
                           "\xf0\x8f\xbf\xbf",
                           "\xf4\x90\x80\x80",
                           "\xf5\x80\x80\x80",
                           "\xf8\x88\x80\x80\x80",
                           "\xff",
                           "\xfe",
                           "\xf0\x9f\x98",
                           "eight by\xff",
                           "seven b\xff and more",
                           "a long text \xe2\x82"})
    CHECK_FALSE(is_utf8(text));
}

TEST_CASE("messages come back as they were") {
  CallMessage call;
  call.verb = Verb::kMethod;
  call.name = "Observer.act";
  call.object = 8;
  call.session = -3;
  call.timeout_ms = 2000;
  call.args = {at::ones({2}), ref(1)};
  call.kwargs.keys = {string("x")};
  call.kwargs.values = {rich_value()};
  const EncodedValue encoded = encode_message({MessageKind::kCall, -9}, to_value(call), address_of);
  const Head head = read_head(encoded.text);
  CHECK(head.kind == MessageKind::kCall);
  CHECK(head.number == -9);
  const CallMessage back = call_of(read_value(encoded.text, encoded.tensors, adopt));
  CHECK(back.verb == call.verb);
  CHECK(back.name == call.name);
  CHECK((back.object == 8 && back.session == -3 && back.timeout_ms == 2000));
  CHECK(is_same(back.args, call.args));
  CHECK(is_same(back.kwargs, call.kwargs));

  const Failure failure =
      failure_of(read(written(to_value(Failure{"ValueError", "builtins", "no", "there", "here"}))));
  CHECK((failure.type == "ValueError" && failure.module == "builtins" && failure.text == "no"));
  CHECK((failure.traceback == "there" && failure.where == "here"));
  const CountMessage count = count_of(read(written(to_value(CountMessage{2, -1, 7}))));
  CHECK((count.holder == 2 && count.change == -1 && count.session == 7));
}

TEST_CASE("messages that are none are refused") {
  const auto said = [](const auto& call) { return error_of<c10::ValueError>([&] { call(); }); };
  const string bye = encode_message({MessageKind::kBye, 0}, Value(), address_of).text;
  CHECK(read_head(bye).kind == MessageKind::kBye);
  for (size_t length = 0; length < 9; ++length) {
    CHECK_THAT(said([&] { read_head(bye.substr(0, length)); }), Catch::Contains("too short"));
    CHECK_THAT(said([&] { read_value(bye.substr(0, length), {}, adopt); }),
               Catch::Contains("too short"));
  }
  const char behind_all = static_cast<char>(static_cast<int>(MessageKind::kBye) + 1);
  for (const char kind : {'\0', behind_all, '\xff'})
    CHECK_THAT(said([&] { read_head(kind + bye.substr(1)); }), Catch::Contains("an unknown kind"));

  const auto with = [](size_t field, Value other) {
    Value value = to_value(CallMessage());
    std::get<Tuple>(value.content).items[field] = std::move(other);
    return value;
  };
  for (const int64_t verb : {int64_t{-1}, kVerbs, std::numeric_limits<int64_t>::max()})
    CHECK_THAT(said([&] { call_of(with(0, verb)); }), Catch::Contains("unknown verb"));
  for (size_t field = 0; field < 7; ++field)
    CHECK_THAT(said([&] { call_of(with(field, true)); }), Catch::Contains("of another kind"));
  Dict kwargs;
  kwargs.keys = {string("x"), int64_t{1}};
  kwargs.values = {Value(), Value()};
  CHECK_THAT(said([&] { call_of(with(6, kwargs)); }), Catch::Contains("of another kind"));
  for (const Value& value : {Value(), Value(Tuple()), Value(List{Values(7)})}) {
    CHECK_THAT(said([&] { call_of(value); }), Catch::Contains("of another form"));
    CHECK_THAT(said([&] { failure_of(value); }), Catch::Contains("of another form"));
    CHECK_THAT(said([&] { count_of(value); }), Catch::Contains("of another form"));
  }
  CHECK_THAT(said([&] { failure_of(Tuple{Values(5)}); }), Catch::Contains("of another kind"));
  CHECK_THAT(said([&] { count_of(Tuple{Values(3)}); }), Catch::Contains("of another kind"));
}

}  // namespace trireme::value_codec_test
