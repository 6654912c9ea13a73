// Whatever reads messages of strategies/remote/, given any bytes: it returns a value whose bytes
// are these again, or throws c10::ValueError. The first byte of an input says how many tensors
// came.

#include <trireme/strategies/remote/value.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <soak/fuzz_target.h>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::remote::test {
namespace {

using Tensors = std::vector<at::Tensor>;

void check(bool is_true) {
  if (!is_true) std::abort();
}

RefPtr adopt(const RefAddress& address) {
  return std::make_shared<const Ref>(address, Ref::Release());
}

RefAddress address_of(const Ref& ref) { return ref.address(); }

std::string bytes_of(const Value& value) { return encode(value, address_of).text; }

const Tensors& all_tensors() {
  static const Tensors all(3, at::ones({2}));
  return all;
}

// What a reader makes of a value is the same after it was written and read once more.
template <typename Message>
void come_back(Message (*read)(const Value&), const Value& value) {
  try {
    const std::string once = bytes_of(to_value(read(value)));
    const EncodedValue written = encode(to_value(read(value)), address_of);
    check(once == bytes_of(to_value(read(decode(once, written.tensors, adopt)))));
  } catch (const c10::ValueError&) {
  }
}

CallMessage read_call(const Value& value) { return call_of(value); }

void read_message(std::string_view text, const Tensors& tensors) {
  const Head head = read_head(text);
  const Value value = read_value(text, tensors, adopt);
  const EncodedValue again = encode_message(head, value, address_of);
  check(again.text == text);
  check(again.tensors.size() == tensors.size());
  check(kind_of(value) != nullptr);
  come_back<CallMessage>(read_call, value);
  come_back<Failure>(failure_of, value);
  come_back<CountMessage>(count_of, value);
}

std::vector<uint8_t> seed_of(const Value& value, MessageKind kind = MessageKind::kAnswer) {
  const EncodedValue encoded = encode_message({kind, 77}, value, address_of);
  std::vector<uint8_t> seed{static_cast<uint8_t>(encoded.tensors.size())};
  seed.insert(seed.end(), encoded.text.begin(), encoded.text.end());
  return seed;
}

// Holds one of each kind.
Value rich_value() {
  const at::Tensor tensor = all_tensors().front();
  Dict dict;
  dict.keys = {std::string("k\xc3\xa4"), int64_t{-3}, Tuple{{true, Bytes{"\xff"}}}, 0.5,
               LargeInt{std::string(9, '\x55')}};
  dict.values = {tensor, List{{Value(), false}}, Set{{int64_t{1}, std::string("a")}}, Dict(),
                 Complex{1, -2}};
  return Tuple{{std::move(dict), adopt({1, -2, 3, "Observer"}), Bytes{std::string(40, '\0')},
                std::numeric_limits<double>::infinity(), std::string("\xf0\x9f\x98\x80 text"),
                List{{tensor, Tuple()}}}};
}

Value nested(int levels) {
  Value value;
  for (int i = 0; i < levels; ++i) value = List{{std::move(value)}};
  return value;
}

}  // namespace
}  // namespace trireme::remote::test

std::vector<std::vector<uint8_t>> trireme::soak::seeds() {
  using namespace trireme::remote;
  using namespace trireme::remote::test;
  CallMessage call;
  call.verb = Verb::kMethod;
  call.name = "Observer.act";
  call.object = 5;
  call.args = {rich_value(), int64_t{1}};
  call.kwargs.keys = {std::string("x"), std::string("y")};
  call.kwargs.values = {1.5, Value()};
  return {seed_of(rich_value()),
          seed_of(to_value(call), MessageKind::kCall),
          seed_of(to_value(Failure{"ValueError", "builtins", "no", "File \"x\"", "function f"}),
                  MessageKind::kFailure),
          seed_of(Value(), MessageKind::kGivenUp),
          seed_of(to_value(CountMessage{1, -1, 9}), MessageKind::kCount),
          seed_of(Value(), MessageKind::kBye),
          seed_of(nested(kDeepest)),
          seed_of(nested(kDeepest - 3))};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme::remote::test;
  if (size == 0) return 0;
  const Tensors tensors(all_tensors().begin(), all_tensors().begin() + data[0] % 4);
  // In memory of its own, so that reading behind it is seen.
  const std::vector<char> text(data + 1, data + size);
  try {
    read_message({text.data(), text.size()}, tensors);
  } catch (const c10::ValueError&) {
  }
  return 0;
}
