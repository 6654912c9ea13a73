// What DataParallel refuses, and exceptions in replicas: the text names who and what, and the next
// step works.

#include <catch_torch.h>
#include <stdexcept>
#include <strategies/data_parallel/replicated_nets.h>
#include <sys/wait.h>
#include <unistd.h>

namespace trireme::data_parallel_faults_test {

using namespace trireme::test;
using Catch::Contains;

namespace {

enum class Fault : uint8_t { kNone, kTorchForward, kStdForward, kBackward, kRows, kShape, kDtype };

// Fails in whoever gets the row that begins with -1, or returns something else there.
struct FaultyImpl : torch::nn::Cloneable<FaultyImpl> {
  FaultyImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1})); }

  std::vector<at::Tensor> forward(const at::Tensor& x, Fault fault) {
    const bool here = x.select(1, 0).eq(-1).any().item<bool>();
    const at::Tensor y = x * weight;
    if (!here) return {y};
    TORCH_CHECK(fault != Fault::kTorchForward, "the forward fell");
    if (fault == Fault::kStdForward) throw std::out_of_range("the forward fell");
    if (fault == Fault::kBackward)
      y.register_hook(
          [](const at::Tensor& /*gradient*/) { TORCH_CHECK(false, "the backward fell"); });
    if (fault == Fault::kRows) return {y, y};
    if (fault == Fault::kShape) return {y.repeat({1, 2})};
    if (fault == Fault::kDtype) return {y.to(at::kDouble)};
    return {y};
  }
  at::Tensor weight;
};
TORCH_MODULE(Faulty);

// The third of four rows, which replica 1 of 2 gets.
at::Tensor rows_with_one() {
  at::Tensor x = at::ones({4, 3});
  x[2][0] = -1;
  return x;
}

struct FaultyModel {
  explicit FaultyModel(int64_t replicas = 2) : model(Faulty(), on_cpu(replicas)) {}

  at::Tensor loss(Fault fault) { return model->forward(rows_with_one(), fault)[0].sum(); }
  bool works() {
    model->zero_grad();
    loss(Fault::kNone).backward();
    return model->module()->weight.grad().item<double>() == 10;
  }
  DataParallel<Faulty> model;
};

struct UnclonableImpl : torch::nn::Module {
  UnclonableImpl() { layer = register_module("layer", torch::nn::Linear(2, 2)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Unclonable);

// Its clones register the tensor that it has.
struct SharingImpl : torch::nn::Cloneable<SharingImpl> {
  SharingImpl() { reset(); }
  void reset() override { register_parameter("weight", weight); }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight = at::ones({1});
};
TORCH_MODULE(Sharing);

std::string text_of_forward(FaultyModel& faulty, Fault fault) {
  return error_of([&] { faulty.loss(fault); });
}

}  // namespace

TEST_CASE("an exception in a forward comes out with the name of its replica") {
  FaultyModel faulty;
  for (int round = 0; round < 3; ++round) {
    CHECK_THAT(text_of_forward(faulty, Fault::kTorchForward),
               Contains("the forward fell") && Contains("replica 1 of 2 (cpu)"));
    CHECK(faulty.works());
  }
  SECTION("and is itself nested in a named one where it has no room for a name") {
    bool seen = false;
    try {
      faulty.loss(Fault::kStdForward);
    } catch (const c10::Error& error) {
      CHECK_THAT(error.what_without_backtrace(),
                 Contains("replica 1 of 2 (cpu)") && Contains("the forward fell"));
      CHECK_THROWS_AS(std::rethrow_if_nested(error), std::out_of_range);
      seen = true;
    }
    CHECK(seen);
    CHECK(faulty.works());
  }
}

TEST_CASE("an exception in a backward comes out with the name of its replica") {
  FaultyModel faulty;
  for (int round = 0; round < 3; ++round) {
    CHECK_THROWS_WITH(faulty.loss(Fault::kBackward).backward(),
                      Contains("the backward fell") && Contains("replica 1 of 2 (cpu)"));
    CHECK(faulty.works());
  }
}

TEST_CASE("after a failed backward nothing of it is left") {
  FaultyModel faulty;
  CHECK_THROWS(faulty.loss(Fault::kBackward).backward());
  CHECK_FALSE(faulty.model->module()->weight.grad().defined());
  faulty.loss(Fault::kNone).backward();
  CHECK(faulty.model->module()->weight.grad().item<double>() == 10);
}

TEST_CASE("outputs that do not fit together are refused by replica") {
  FaultyModel faulty;
  CHECK_THAT(text_of_forward(faulty, Fault::kRows),
             Contains("[data_parallel] got an output container of length 2 from replica 1 of 2") &&
                 Contains("expected 1 as from replica 0 of 2"));
  CHECK_THAT(text_of_forward(faulty, Fault::kShape),
             Contains("got shape [2, 6] for output 0 from replica 1 of 2") &&
                 Contains("[2, 3] as from replica 0"));
  CHECK_THAT(text_of_forward(faulty, Fault::kDtype),
             Contains("got Double") && Contains("for output 0 from replica 1 of 2") &&
                 Contains("expected Float") && Contains("as from replica 0"));
  CHECK(faulty.works());
}

TEST_CASE("inputs that cannot be cut are refused") {
  FaultyModel faulty(3);
  DataParallelOptions options = on_cpu(2);
  options.dim = 2;
  DataParallel<Layers> model(Layers(), options);
  CHECK_THROWS_WITH(model->forward(characters(0, 4)),
                    Contains("[data_parallel] got dim 2 for an input of 2 dimensions") &&
                        Contains("expected -2 to 1"));
  const auto sum = [](const std::vector<at::Tensor>& output, const at::Tensor& target) {
    return (output[0] - target).sum();
  };
  CHECK_THROWS_WITH(faulty.model->loss(sum, at::ones({2, 3}), at::ones({9, 3}), Fault::kNone),
                    Contains("got a tensor of 2 rows beside one of 9"));
  CHECK(faulty.works());
}

TEST_CASE("a loss is one floating-point number") {
  FaultyModel faulty;
  const auto wrong = [](const std::vector<at::Tensor>& output, const at::Tensor& /*target*/) {
    return output[0];
  };
  CHECK_THROWS_WITH(faulty.model->loss(wrong, at::ones({4}), rows_with_one(), Fault::kNone),
                    Contains("got a loss of 2 dimensions and Float from replica 0 of 2") &&
                        Contains("expected one floating-point number"));
  const auto none = [](const std::vector<at::Tensor>& /*output*/, const at::Tensor& /*target*/) {
    return at::Tensor();
  };
  CHECK_THROWS_WITH(faulty.model->loss(none, at::ones({4}), rows_with_one(), Fault::kNone),
                    Contains("got a loss that is undefined"));
  CHECK(faulty.works());
}

TEST_CASE("a second derivative has no graph, and says where there is one") {
  FaultyModel faulty;
  CHECK_THROWS_WITH(faulty.loss(Fault::kNone).backward({}, true, /*create_graph=*/true),
                    Contains("create_graph=True") && Contains("trireme.data_parallel"));
  CHECK(faulty.works());
}

// After at::set_num_threads() torch aborts in a forked child that begins threads.
TEST_CASE("a forked process makes threads of its own") {
  DataParallel<WholeNumbers> model(WholeNumbers(), on_cpu(2));
  const at::Tensor expected = model->forward(whole_rows(5)).detach();
  const pid_t child = fork();
  if (child == 0) _exit(at::equal(model->forward(whole_rows(5)), expected) ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  CHECK(at::equal(model->forward(whole_rows(5)), expected));
}

TEST_CASE("modules that cannot be cloned are refused, but for a single replica") {
  CHECK_THROWS_AS(DataParallel<Unclonable>(Unclonable(), on_cpu(2)), c10::NotImplementedError);
  CHECK_THROWS_WITH(DataParallel<Unclonable>(Unclonable(), on_cpu(2)),
                    Contains("[data_parallel] got a module that cannot be cloned") &&
                        Contains("torch::nn::Cloneable"));
  DataParallel<Unclonable> alone(Unclonable(), on_cpu(1));
  const at::Tensor output = alone->forward(at::ones({4, 2}));
  CHECK(at::equal(output, alone->module()->forward(at::ones({4, 2}))));
  CHECK(alone->last_step().replicas.empty());
  CHECK_THROWS_AS(alone->clone(), c10::NotImplementedError);
}

TEST_CASE("clones that share a parameter with their module are refused") {
  CHECK_THROWS_WITH(DataParallel<Sharing>(Sharing(), on_cpu(2)),
                    Contains("[data_parallel] got a clone that has the very 'weight'"));
}

TEST_CASE("a DataParallel in the module is refused") {
  DataParallel<torch::nn::Linear> inner(torch::nn::Linear(2, 2), on_cpu(2));
  torch::nn::Sequential net;
  net->push_back("inner", std::make_shared<UnclonableImpl>());
  net->register_module("nested", inner.ptr());
  CHECK_THROWS_WITH(DataParallel<torch::nn::Sequential>(net, on_cpu(2)),
                    Contains("[data_parallel] got a DataParallel at 'nested'"));
}

TEST_CASE("options that contradict each other are refused") {
  const auto refused = [](DataParallelOptions options) {
    return error_of<c10::ValueError>([&] { DataParallel<Faulty>(Faulty(), std::move(options)); });
  };
  DataParallelOptions options;
  SECTION("a negative number of replicas") {
    options.replicas = -1;
    CHECK_THAT(refused(options), Contains("got -1 replicas, expected at least 1"));
  }
  SECTION("as many replicas as devices") {
    options.replicas = 3;
    options.devices.assign(2, c10::Device(c10::kCPU));
    CHECK_THAT(refused(options), Contains("got 3 replicas and 2 devices"));
  }
  SECTION("as many weights as replicas") {
    options.replicas = 3;
    options.weights = {1, 1};
    CHECK_THAT(refused(options), Contains("got 2 weights, expected one for each of 3 replicas"));
  }
  SECTION("weights that are shares") {
    options.weights = {1, -1};
    CHECK_THAT(refused(options), Contains("got the weight -1.0"));
  }
  SECTION("weights, or a balance that finds them") {
    options.weights = {1, 1};
    options.auto_balance = true;
    CHECK_THAT(refused(options), Contains("got weights and auto_balance"));
  }
  SECTION("a module on the first device") {
    options.devices.assign(2, c10::Device(c10::kMeta));
    CHECK_THAT(refused(options), Contains("got a module on cpu, expected it on meta"));
  }
  SECTION("one kind of device") {
    options.devices = {c10::Device(c10::kCPU), c10::Device(c10::kMeta)};
    CHECK_THAT(refused(options), Contains("got replicas on cpu and meta"));
  }
  SECTION("devices that exist") {
    options.devices = {c10::Device(c10::kCPU), c10::Device(c10::kXLA, 0)};
    CHECK_THAT(refused(options), Contains("got the device xla:0, expected one of the 0"));
    options.devices.clear();
    options.output_device = c10::Device(c10::kXLA, 0);
    CHECK_THAT(refused(options), Contains("got the device xla:0"));
  }
}

}  // namespace trireme::data_parallel_faults_test
