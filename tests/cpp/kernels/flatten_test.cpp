#include <trireme/kernels/flatten.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include "catch_torch.h"
#include "kernels/reference.h"

namespace trireme::flatten_test {

namespace {

using reference::draw;
using reference::first_difference;
using trireme::flatten;
using trireme::flatten_accumulate;
using trireme::unflatten;

// Tensors of all dtypes and of uneven lengths; together more than one thread's share.
std::vector<at::Tensor> uneven_tensors() {
  return {draw(1, at::kFloat, 1),        draw(0, at::kHalf, 2),   draw(1003, at::kDouble, 3),
          draw(70001, at::kBFloat16, 4), draw(64, at::kFloat, 5), draw(513, at::kHalf, 6),
          draw(40000, at::kFloat, 7),    draw(0, at::kDouble, 8)};
}

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

template <typename Part>
void for_parts(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, const Part& part) {
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    part(flat.narrow(0, begin, tensor.numel()), tensor);
    begin += tensor.numel();
  }
}

}  // namespace

TEST_CASE("flatten lays scaled and cast tensors one after another") {
  const reference::ThreeThreads threads;
  const std::vector<at::Tensor> inputs = uneven_tensors();
  for (const at::ScalarType dtype : reference::kDtypes) {
    for (const double scale : {1.0, 1.0 / 3}) {
      INFO(dtype << ", scale " << scale);
      const at::Tensor expected = at::empty({numel_of(inputs)}, dtype);
      for_parts(inputs, expected, [scale](const at::Tensor& part, const at::Tensor& input) {
        reference::scaled_copy(part, input, scale);
      });
      const at::Tensor flat = at::empty({numel_of(inputs)}, dtype);
      flatten(inputs, flat, scale);
      CHECK(first_difference(flat, expected) == -1);
      CHECK(first_difference(flatten(inputs, dtype, scale), expected) == -1);
    }
  }
}

TEST_CASE("flatten_accumulate adds a second gradient") {
  const reference::ThreeThreads threads;
  const std::vector<at::Tensor> inputs = uneven_tensors();
  for (const at::ScalarType dtype : reference::kDtypes) {
    INFO(dtype);
    const at::Tensor flat = draw(numel_of(inputs), dtype, 9).flip(0);
    const at::Tensor expected = flat.clone();
    for_parts(inputs, expected, [](const at::Tensor& part, const at::Tensor& input) {
      reference::scaled_add(part, input, 0.7);
    });
    flatten_accumulate(inputs, flat, 0.7);
    CHECK(first_difference(flat, expected) == -1);
  }
}

TEST_CASE("unflatten is the way back") {
  const reference::ThreeThreads threads;
  for (const at::ScalarType dtype : reference::kDtypes) {
    INFO(dtype);
    const std::vector<at::Tensor> outputs = uneven_tensors();
    const at::Tensor flat = draw(numel_of(outputs), dtype, 10);
    unflatten(flat, outputs, 0.7);
    for_parts(outputs, flat, [](const at::Tensor& part, const at::Tensor& output) {
      const at::Tensor expected = at::empty_like(output);
      reference::scaled_copy(expected, part, 0.7);
      CHECK(first_difference(output, expected) == -1);
    });
  }
}

TEST_CASE("a round trip keeps every bit") {
  for (const at::ScalarType dtype : reference::kDtypes) {
    INFO(dtype);
    const std::vector<at::Tensor> inputs = {draw(50000, dtype, 11), draw(3, dtype, 12)};
    const std::vector<at::Tensor> outputs = {at::empty_like(inputs[0]), at::empty_like(inputs[1])};
    unflatten(flatten(inputs, dtype), outputs);
    CHECK(reference::same_bits(outputs[0], inputs[0]));
    CHECK(reference::same_bits(outputs[1], inputs[1]));
  }
}

TEST_CASE("each tensor is taken in its own memory order") {
  const at::Tensor image =
      at::arange(24.0).view({1, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor transposed = at::arange(6.0).view({2, 3}).t();
  const at::Tensor flat = flatten({image, transposed}, at::kFloat);
  CHECK(at::equal(flat.narrow(0, 0, 24), image.permute({0, 2, 3, 1}).reshape({24})));
  CHECK(at::equal(flat.narrow(0, 24, 6), at::arange(6.0)));
  const at::Tensor back = at::empty_like(image);
  const at::Tensor transposed_back = at::empty_like(transposed);
  unflatten(flat, {back, transposed_back});
  CHECK(at::equal(back, image));
  CHECK(at::equal(transposed_back, transposed));
}

TEST_CASE("complex tensors count as twice as many reals") {
  const at::Tensor complex = at::randn({5, 3}, at::kComplexFloat);
  const at::Tensor real = at::randn({4});
  const at::Tensor flat = flatten({complex, real}, at::kDouble, 2.0);
  CHECK(flat.numel() == 34);
  const at::Tensor reals = at::view_as_real(complex).reshape({30}).to(at::kDouble);
  CHECK(at::equal(flat.narrow(0, 0, 30), reals * 2));

  const at::Tensor complex_flat = flatten({complex, real}, at::kComplexFloat);
  CHECK(complex_flat.numel() == 17);
  CHECK(at::equal(complex_flat.narrow(0, 0, 15), complex.reshape({15})));
  CHECK_THROWS_WITH(flatten({complex, at::ones({1})}, at::kComplexFloat),
                    Catch::Contains("got 31 real elements for dtype ComplexFloat"));
}

TEST_CASE("nothing to flatten is no error") {
  CHECK(flatten(at::TensorList(), at::kHalf).numel() == 0);
  CHECK(flatten({at::empty({0, 3})}, at::kHalf).scalar_type() == at::kHalf);
  flatten(at::TensorList(), at::empty({0}));
  unflatten(at::empty({0}), at::TensorList());
}

TEST_CASE("tensors may be their own slices of flat") {
  const at::Tensor flat = draw(1000, at::kFloat, 13);
  const std::vector<at::Tensor> views = {flat.narrow(0, 0, 300), flat.narrow(0, 300, 700)};
  const at::Tensor before = flat.clone();
  flatten(views, flat);
  CHECK(reference::same_bits(flat, before));
  unflatten(flat, views, 0.5);
  const at::Tensor expected = at::empty_like(before);
  reference::scaled_copy(expected, before, 0.5);
  CHECK(first_difference(flat, expected) == -1);
}

TEST_CASE("what is written has its version moved") {
  const at::Tensor input = at::empty({4});  // a fresh version counter
  const at::Tensor flat = at::empty({4});
  const at::Tensor output = at::empty({4});
  flatten({input}, flat);
  CHECK(flat._version() == 1);
  flatten_accumulate({input}, flat);
  CHECK(flat._version() == 2);
  unflatten(flat, {output});
  CHECK(output._version() == 1);
  CHECK(input._version() == 0);
}

TEST_CASE("devices without a kernel get the same bits from ATen's copies") {
  // Asked for by the key of a device that has no kernel, the dispatcher takes the one that serves
  // any device.
  const c10::DispatchKeySet no_kernel(c10::DispatchKey::PrivateUse1);
  auto& dispatcher = c10::Dispatcher::singleton();
  using IntoFlat = void(at::TensorList, const at::Tensor&, double);
  using OutOfFlat = void(const at::Tensor&, at::TensorList, double);
  const auto flatten_op =
      dispatcher.findSchemaOrThrow("trireme::flatten", "into").typed<IntoFlat>();
  const auto accumulate_op =
      dispatcher.findSchemaOrThrow("trireme::flatten_accumulate", "").typed<IntoFlat>();
  const auto unflatten_op =
      dispatcher.findSchemaOrThrow("trireme::unflatten", "").typed<OutOfFlat>();

  const std::vector<at::Tensor> inputs = uneven_tensors();
  for (const at::ScalarType dtype : reference::kDtypes) {
    for (const double scale : {1.0, 0.7}) {
      INFO(dtype << ", scale " << scale);
      const at::Tensor expected = flatten(inputs, dtype, scale);
      const at::Tensor flat = at::empty_like(expected);
      flatten_op.redispatch(no_kernel, inputs, flat, scale);
      CHECK(first_difference(flat, expected) == -1);
      flatten_accumulate(inputs, expected, scale);
      accumulate_op.redispatch(no_kernel, inputs, flat, scale);
      CHECK(first_difference(flat, expected) == -1);

      const std::vector<at::Tensor> outputs = uneven_tensors();
      const std::vector<at::Tensor> expected_outputs = uneven_tensors();
      unflatten_op.redispatch(no_kernel, flat, outputs, scale);
      unflatten(flat, expected_outputs, scale);
      for (size_t i = 0; i < outputs.size(); ++i) {
        CHECK(first_difference(outputs[i], expected_outputs[i]) == -1);
      }
    }
  }
}

TEST_CASE("what cannot be flattened is refused by name") {
  const at::Tensor two = at::ones({2});
  const at::Tensor flat = at::zeros({6});
  CHECK_THROWS_WITH(
      flatten({two, at::ones({4}, at::kLong)}, flat),
      Catch::Contains("[flatten] got dtype Long for tensor 1, expected real or complex float32, "
                      "float64, float16 or bfloat16. Keep other dtypes out of the list."));
  CHECK_THROWS_AS(flatten({two.to_sparse()}, flat), c10::TypeError);
  CHECK_THROWS_AS(flatten({two}, at::zeros({2}, at::kInt)), c10::TypeError);
  CHECK_THROWS_WITH(
      flatten({two, at::ones({8}).slice(0, 0, 8, 2)}, flat),
      Catch::Contains("[flatten] got tensor 1 of shape [4] with strides [2], expected "
                      "non-overlapping and dense memory. Call contiguous() on it first."));
  CHECK_THROWS_AS(unflatten(flat, {at::ones({1}).expand({6})}), c10::ValueError);
  CHECK_THROWS_WITH(
      flatten_accumulate({two, two}, flat),
      Catch::Contains("[flatten_accumulate] got a flat tensor of 6 real elements, expected 4 as in "
                      "the 2 tensors. Allocate the flat tensor for this list."));
  CHECK_THROWS_WITH(unflatten(at::zeros({12}).slice(0, 0, 12, 2), {flat}),
                    Catch::Contains("[unflatten] got a flat tensor of shape [6] with strides [2], "
                                    "expected one contiguous dimension."));
  CHECK_THROWS_AS(flatten({flat.view({2, 3})}, flat.view({2, 3})), c10::ValueError);
  CHECK_THROWS_WITH(flatten({at::empty({6}, at::kMeta)}, flat),
                    Catch::Contains("got tensor 0 on meta, expected cpu where the flat tensor is"));
}

}  // namespace trireme::flatten_test
