// Tensors in containers: which types hold some, and who is shown which.

#include <trireme/module/for_each_tensor.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <list>
#include <string>

namespace trireme::for_each_tensor_test {

namespace {

using Tensors = std::vector<at::Tensor>;
struct Descending {
  bool operator()(int a, int b) const { return a > b; }
};

static_assert(kHoldsTensors<at::Tensor> && kHoldsTensors<Tensors> && kHoldsTensors<const Tensors>);
static_assert(kHoldsTensors<std::array<std::optional<at::Tensor>, 3>>);
static_assert(kHoldsTensors<std::pair<int, at::Tensor>> && kHoldsTensors<std::tuple<int, Tensors>>);
static_assert(kHoldsTensors<std::tuple<at::Tensor&, int>>);
static_assert(kHoldsTensors<std::map<int, Tensors, Descending>>);
static_assert(kHoldsTensors<std::unordered_map<std::string, at::Tensor>>);

static_assert(!kHoldsTensors<std::string> && !kHoldsTensors<std::vector<bool>>);
static_assert(!kHoldsTensors<std::tuple<>> && !kHoldsTensors<std::pair<int, std::string>>);
static_assert(!kHoldsTensors<at::Tensor*> && !kHoldsTensors<std::list<at::Tensor>>);
static_assert(!kHoldsTensors<at::TensorList>);

at::Tensor number(int value) { return at::full({}, value); }

template <typename T>
std::vector<int> numbers_in(T& value) {
  std::vector<int> found;
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    found.push_back(tensor.defined() ? tensor.item<int>() : -1);
  });
  return found;
}

}  // namespace

TEST_CASE("every tensor is met, in order") {
  using Found = std::vector<int>;
  at::Tensor one = number(1);
  CHECK(numbers_in(one) == Found{1});
  const std::map<int, Tensors, Descending> map{{1, {number(2)}}, {3, {number(0), number(1)}}};
  CHECK(numbers_in(map) == Found{0, 1, 2});
  const auto tuple = std::make_tuple(3, one, std::string("name"), std::array{number(2), number(3)},
                                     std::make_pair(number(4), std::vector<bool>{true}),
                                     std::optional<Tensors>({number(5), at::Tensor()}));
  CHECK(numbers_in(tuple) == Found{1, 2, 3, 4, 5, -1});
  const std::tuple<at::Tensor&, const int&> references(one, 7);
  CHECK(numbers_in(references) == Found{1});
  const std::unordered_map<std::string, at::Tensor> hashed{{"a", number(8)}};
  CHECK(numbers_in(hashed) == Found{8});
}

TEST_CASE("where none is, nobody is called") {
  std::string text = "text";
  std::optional<at::Tensor> absent;
  Tensors none;
  CHECK(numbers_in(text).empty());
  CHECK(numbers_in(absent).empty());
  CHECK(numbers_in(none).empty());
}

TEST_CASE("tensors that are not const can be replaced") {
  auto value = std::make_tuple(number(1), Tensors{number(2)}, std::optional<at::Tensor>(number(3)),
                               std::map<int, at::Tensor>{{0, number(4)}});
  for_each_tensor(value, [](at::Tensor& tensor) { tensor = tensor * 10; });
  CHECK(numbers_in(value) == std::vector<int>{10, 20, 30, 40});
}

}  // namespace trireme::for_each_tensor_test
