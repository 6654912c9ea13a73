// A value as one tensor of bytes: there and back, and bytes that are none.

#include <trireme/comm/packed_value.h>

#include <trireme/comm/value_codec.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace trireme::packed_value_test {

using namespace trireme::values;
using trireme::test::error_of;

namespace {

constexpr ValueOrigin kOrigin{"horovod", "obj", {1, 3}};

Value mixed() {
  Dict dict;
  dict.keys = {std::string("text"), int64_t{2}};
  dict.values = {List{{at::arange(7), at::zeros({0, 3}), at::ones({}, at::kBool)}},
                 at::randn({4, 6}).t()};
  return Tuple{{std::move(dict), Bytes{"\xff"}, at::randn({3, 4}).slice(0, 0, 3, 2)}};
}

void check_same(const Value& a, const Value& b) {
  const auto refuse = [](const Ref&) -> RefAddress { return {}; };
  const EncodedValue one = encode(a, refuse);
  const EncodedValue other = encode(b, refuse);
  CHECK(one.text == other.text);
  REQUIRE(one.tensors.size() == other.tensors.size());
  for (size_t i = 0; i < one.tensors.size(); ++i) {
    CHECK(one.tensors[i].dtype() == other.tensors[i].dtype());
    CHECK(at::equal(one.tensors[i], other.tensors[i]));
  }
}

}  // namespace

TEST_CASE("A value with tensors comes back from one tensor of bytes", "[packed_value]") {
  for (const Value& value :
       {Value(), mixed(), Value(at::randn({5})), Value(std::string(200, 'x'))}) {
    const at::Tensor bytes = pack_value(value, kOrigin);
    CHECK(bytes.scalar_type() == at::kByte);
    CHECK(bytes.numel() % 64 == 0);
    check_same(unpack_value(bytes), value);
  }
  // Behind another one, as ranks' values lie that were gathered.
  const Value value = mixed();
  const at::Tensor one = pack_value(value, kOrigin);
  check_same(unpack_value(at::cat({one, one}).slice(0, one.numel())), value);
}

TEST_CASE("What cannot be packed is refused with its place and its rank", "[packed_value]") {
  CHECK_THAT(
      error_of<c10::TypeError>([] { pack_value(List{{at::eye(2).to_sparse()}}, kOrigin); }),
      Catch::Contains("[horovod] got a value that cannot be sent: obj[0] is a Tensor that has "
                      "the layout Sparse (rank 1 of 3)"));
  CHECK_THAT(error_of<c10::ValueError>([] { pack_value(std::string("\xff"), kOrigin); }),
             Catch::Contains("obj is a text that is not UTF-8"));
}

TEST_CASE("Bytes that are no packed value say what is wrong with them", "[packed_value]") {
  const at::Tensor whole = pack_value(mixed(), kOrigin);
  const auto said = [](const at::Tensor& bytes) {
    return error_of<c10::ValueError>([&] { unpack_value(bytes); });
  };
  CHECK_THAT(said(at::zeros({8}, at::kByte)),
             Catch::Contains("[values] got bytes of a packed value that end"));
  CHECK_THAT(said(whole.slice(0, 0, 64)), Catch::Contains("have a part beyond its bytes"));
  CHECK_THAT(said(at::cat({whole, at::zeros({64}, at::kByte)})),
             Catch::Contains("have parts of other lengths"));
  CHECK_THAT(said(at::full({640}, 0xff, at::kByte)),
             Catch::Contains("have a part beyond its bytes"));
  // Any one byte changed: another value, or an error, and no other read.
  int64_t refused = 0;
  for (int64_t i = 0; i < whole.numel(); ++i) {
    at::Tensor changed = whole.clone();
    changed[i].bitwise_xor_(0x81);
    try {
      unpack_value(changed);
    } catch (const c10::ValueError&) {
      ++refused;
    }
  }
  CHECK(refused > 0);
}

}  // namespace trireme::packed_value_test
