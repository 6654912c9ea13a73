// What goes into a forward of DataParallel and comes out: structures, sizes, shares, threads.

#include <trireme/strategies/data_parallel/core_groups.h>
#include <trireme/strategies/data_parallel/speed_balance.h>

#include <ATen/Parallel.h>

#include <array>
#include <atomic>
#include <catch_torch.h>
#include <strategies/data_parallel/replicated_nets.h>

namespace trireme::data_parallel_forms_test {

using namespace trireme::test;

namespace {

// Calls a function in place of a forward, and counts how often.
template <typename Function>
struct CallingImpl : torch::nn::Cloneable<CallingImpl<Function>> {
  explicit CallingImpl(Function function)
      : function(std::make_shared<const Function>(std::move(function))) {
    reset();
  }
  void reset() override { weight = this->register_parameter("weight", torch::ones({1})); }
  template <typename... Args>
  auto forward(Args&&... args) {
    return (*function)(*this, std::forward<Args>(args)...);
  }
  std::shared_ptr<const Function> function;  // lambdas cannot be assigned, as modules are
  at::Tensor weight;
};

template <typename Function>
auto replicated(const DataParallelOptions& options, Function function) {
  using Net = CallingImpl<Function>;
  return DataParallel<std::shared_ptr<Net>>(std::make_shared<Net>(std::move(function)), options);
}
template <typename Function>
auto replicated(int64_t replicas, Function function) {
  return replicated(on_cpu(replicas), std::move(function));
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() : weight(register_parameter("weight", torch::randn({4, 4}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Plain);

struct HoldingImpl : torch::nn::Cloneable<HoldingImpl> {
  HoldingImpl() { reset(); }
  void reset() override { inside = register_module("inside", Plain()); }
  at::Tensor forward(const at::Tensor& x) { return inside(x); }
  Plain inside{nullptr};
};
TORCH_MODULE(Holding);

at::Tensor rows(int64_t count, double times = 1) {
  return at::arange(count * 2, at::kFloat).view({count, 2}) * times;
}

std::vector<int64_t> rows_of(const ReplicasReport& report) {
  std::vector<int64_t> found;
  for (const ReplicaReport& replica : report.replicas) found.push_back(replica.rows);
  return found;
}

}  // namespace

static_assert(!kCannotBeCut<std::tuple<at::Tensor, int&, std::string>>);
static_assert(kCannotBeCut<at::TensorList> && kCannotBeCut<std::tuple<at::Tensor&>>);
static_assert(kCannotBeCut<std::vector<torch::nn::utils::rnn::PackedSequence>>);
static_assert(kCannotBeCut<std::optional<const at::Tensor>>);

TEST_CASE("containers are cut and put together wherever tensors hide in them") {
  using Named = std::map<std::string, std::vector<at::Tensor>>;
  using Hashed = std::unordered_map<int, at::Tensor>;
  auto model = replicated(
      3, [](auto& net, const std::pair<at::Tensor, int>& pair, std::array<at::Tensor, 2> both,
            const Named& named, Hashed hashed, const std::optional<at::Tensor>& maybe) {
        const at::Tensor sum = pair.first * pair.second + both[0] + both[1];
        TORCH_CHECK(named.at("list")[1].sizes() == sum.sizes(), "not cut");
        hashed[7] = hashed.at(7) * net.weight;
        return std::make_tuple(sum * net.weight, Named{{"list", {named.at("list")[1], sum}}},
                               hashed, maybe ? std::optional<at::Tensor>(*maybe + 1) : std::nullopt,
                               std::string("name"));
      });
  const Named named{{"list", {rows(7, 3), rows(7, 4)}}};
  const Hashed hashed{{7, rows(7, 5)}, {3, rows(7, 6)}, {99, rows(7, 7)}};
  const auto [sum, lists, numbers, maybe, name] = model->forward(
      std::make_pair(rows(7), 2), std::array<at::Tensor, 2>{rows(7, 3), at::ones({})}, named,
      hashed, std::optional<at::Tensor>(rows(7)));
  CHECK(at::equal(sum, rows(7, 5) + 1));
  CHECK(at::equal(lists.at("list")[0], rows(7, 4)));
  CHECK(at::equal(lists.at("list")[1], rows(7, 5) + 1));
  CHECK(at::equal(numbers.at(7), rows(7, 5)));
  CHECK(at::equal(numbers.at(3), rows(7, 6)));
  CHECK(at::equal(numbers.at(99), rows(7, 7)));
  REQUIRE(maybe.has_value());
  CHECK(at::equal(*maybe, rows(7) + 1));
  CHECK(name == "name");
  (sum + numbers.at(7)).sum().backward();
  CHECK(model->module()->weight.grad().item<double>() ==
        (rows(7, 5) + 1 + rows(7, 5)).sum().item<double>());
  SECTION("and what is absent stays so") {
    const auto output =
        model->forward(std::make_pair(rows(7), 2), std::array<at::Tensor, 2>{rows(7), at::ones({})},
                       named, hashed, std::optional<at::Tensor>());
    CHECK_FALSE(std::get<3>(output).has_value());
  }
}

TEST_CASE("undefined tensors go in and come out as they are") {
  auto model = replicated(2, [](auto& net, const at::Tensor& none, const at::Tensor& x) {
    return std::vector<at::Tensor>{x * net.weight, none};
  });
  const std::vector<at::Tensor> output = model->forward(at::Tensor(), rows(4));
  CHECK(at::equal(output[0], rows(4)));
  CHECK_FALSE(output[1].defined());
}

TEST_CASE("other arguments are copied to each replica, other outputs are replica 0's") {
  auto model = replicated(
      2, [](auto& /*net*/, const at::Tensor& x, std::vector<double> list, const char* text) {
        list.push_back(x[0][0].item<double>());
        return std::make_pair(x, std::make_pair(list, std::string(text)));
      });
  const std::vector<double> list{1.5};
  const auto output = model->forward(rows(4), list, "text");
  CHECK(output.second.first == std::vector<double>{1.5, 0});
  CHECK(output.second.second == "text");
  CHECK(list.size() == 1);
}

TEST_CASE("0-dim tensors go to all, with gradients, and come back as a vector") {
  auto model = replicated(3, [](auto& net, const at::Tensor& scale, const at::Tensor& x) {
    return (x * scale * net.weight).sum();
  });
  const at::Tensor scale = at::full({}, 2.0).requires_grad_(true);
  const at::Tensor output = model->forward(scale, rows(6));
  CHECK(output.sizes() == at::IntArrayRef({3}));
  CHECK(output.sum().item<double>() == 2 * rows(6).sum().item<double>());
  output.sum().backward();
  CHECK(scale.grad().item<double>() == rows(6).sum().item<double>());
}

TEST_CASE("another dimension of the batch, from the end too") {
  for (const int64_t dim : {1, -2}) {
    DataParallel<torch::nn::LSTM> model(torch::nn::LSTM(torch::nn::LSTMOptions(3, 4)),
                                        {.replicas = 2, .dim = dim});
    const at::Tensor x = at::sin(at::arange(5 * 6 * 3, at::kFloat)).view({5, 6, 3});
    const auto hidden = std::make_tuple(at::ones({1, 6, 4}), at::zeros({1, 6, 4}));
    const auto [output, states] = model->forward(x, std::make_optional(hidden));
    const auto [expected, expected_states] = model->module()->forward(x, hidden);
    CHECK(at::allclose(output, expected, 1e-5, 1e-6));
    CHECK(at::allclose(std::get<0>(states), std::get<0>(expected_states), 1e-5, 1e-6));
    CHECK(at::allclose(std::get<1>(states), std::get<1>(expected_states), 1e-5, 1e-6));
  }
}

TEST_CASE("fewer rows than replicas, one, none, and no tensor at all") {
  auto calls = std::make_shared<std::atomic<int>>(0);
  auto model = replicated(3, [calls](auto& net, const std::optional<at::Tensor>& x) {
    ++*calls;
    return x ? *x * net.weight : net.weight * 5;
  });
  const auto counted = [&](const std::optional<at::Tensor>& x) {
    *calls = 0;
    return model->forward(x);
  };
  CHECK(at::equal(counted(rows(2)), rows(2)));
  CHECK(*calls == 2);
  CHECK(at::equal(counted(rows(1)), rows(1)));
  CHECK(*calls == 1);
  CHECK(counted(rows(0)).sizes() == at::IntArrayRef({0, 2}));
  CHECK(*calls == 1);
  const at::Tensor output = counted(std::nullopt);
  CHECK(*calls == 1);
  CHECK(output.item<double>() == 5);
  output.backward();
  CHECK(model->module()->weight.grad().item<double>() == 5);
}

TEST_CASE("the loss of an empty batch") {
  auto model = replicated(2, [](auto& net, const at::Tensor& x) { return x * net.weight; });
  const auto sum = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).sum();
  };
  CHECK(model->loss(sum, rows(0), rows(0)).item<double>() == 0);
}

TEST_CASE("weights are shares of the batch, and the result is that of the whole") {
  const at::Tensor x = whole_rows(8);
  WholeNumbers alone;
  const at::Tensor expected = alone->forward(x);
  expected.sum().backward();
  for (const std::vector<double>& weights : {std::vector<double>{3, 1}, {1, 0, 3}, {1, 1, 6}}) {
    CAPTURE(weights);
    DataParallelOptions options;
    options.weights = weights;
    WholeNumbers net;
    DataParallel<WholeNumbers> model(net, options);
    const at::Tensor output = model->forward(x);
    output.sum().backward();
    CHECK(at::equal(output, expected));
    CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 0) == 0);
    CHECK(model->devices().size() == weights.size());
    std::vector<int64_t> shares(weights.size());
    for (const Chunk& chunk : weighted_chunks(8, weights)) shares[chunk.replica] = chunk.rows;
    CHECK(rows_of(model->last_step()) == shares);
  }
}

TEST_CASE("auto_balance goes by what the report says, and the loss stays the mean of the batch") {
  DataParallelOptions options = on_cpu(2);
  options.auto_balance = true;
  auto first = std::make_shared<std::atomic<const void*>>(nullptr);
  auto model = replicated(options, [first](auto& net, const at::Tensor& x) {
    // Whoever began with the first row is slow.
    if (x.numel() > 0 && x[0][0].item<double>() == 0) *first = &net;
    const bool slow = first->load() == static_cast<const void*>(&net);
    for (int64_t i = 0; slow && i < x.size(0); ++i) at::arange(500'000, at::kDouble).sin().sum();
    return x * net.weight;
  });
  const auto mean = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  const double expected = rows(8).square().mean().item<double>();
  SpeedBalance balance(2);
  for (int step = 0; step < 8; ++step) {
    const at::Tensor loss = model->loss(mean, at::zeros({8, 2}), rows(8));
    CHECK(loss.item<double>() == Approx(expected));
    loss.backward();
    const auto report = model->last_step();
    const std::vector<Chunk> chunks = weighted_chunks(8, balance.weights());
    std::vector<int64_t> shares(2);
    std::vector<double> milliseconds;
    for (const Chunk& chunk : chunks) {
      shares[chunk.replica] = chunk.rows;
      const auto& replica = report.replicas[chunk.replica];
      milliseconds.push_back(replica.forward_ms + replica.backward_ms);
    }
    CHECK(rows_of(report) == shares);
    balance.record(chunks, milliseconds);
  }
  CHECK(balance.weights()[0] < balance.weights()[1]);  // the slow one gets less
}

TEST_CASE("each core is used once, and the caller keeps its threads") {
  const int before = at::get_num_threads();
  at::set_num_threads(5);
  auto seen = std::make_shared<std::array<std::atomic<int>, 8>>();
  auto model = replicated(2, [seen](auto& net, const at::Tensor& x) {
    (*seen)[static_cast<size_t>(at::get_num_threads())]++;
    return x * net.weight;
  });
  model->forward(rows(4)).sum().backward();
  CHECK(at::get_num_threads() == 5);
  at::set_num_threads(4);
  model->replicate();
  model->forward(rows(4));
  CHECK(at::get_num_threads() == 4);
  at::set_num_threads(before);
  CHECK((*seen)[3] == 1);
  CHECK((*seen)[2] == 3);
}

TEST_CASE("by default as many replicas as suit the machine") {
  DataParallel<WholeNumbers> model{WholeNumbers()};
  CHECK(static_cast<int64_t>(model->devices().size()) == default_replicas(at::get_num_threads()));
  CHECK(at::equal(model->forward(whole_rows(5)), WholeNumbers()->forward(whole_rows(5))));
}

TEST_CASE("devices by name, one of them twice") {
  DataParallelOptions options;
  options.devices = {c10::Device("cpu"), c10::Device("cpu:0"), c10::Device("cpu")};
  DataParallel<WholeNumbers> model(WholeNumbers(), options);
  CHECK(model->devices() == std::vector<c10::Device>(3, c10::Device(c10::kCPU)));
  CHECK(at::equal(model->forward(whole_rows(5)), WholeNumbers()->forward(whole_rows(5))));
}

TEST_CASE("a Sequential with names, and modules that occur twice in it") {
  torch::manual_seed(5);
  torch::nn::Linear twice(4, 4);
  torch::nn::Sequential net;
  net->push_back("second", twice);
  net->push_back("tanh", torch::nn::Tanh());
  net->push_back("first", torch::nn::Linear(4, 4));
  net->push_back("0", twice);
  DataParallel<torch::nn::Sequential> model(net, on_cpu(2));
  const at::Tensor x = whole_rows(6);
  model->forward(x).square().sum().backward();
  const Values found = gradients_of(*net);
  net->zero_grad();
  net->forward(x).square().sum().backward();
  CHECK(count_unlike(found, gradients_of(*net), 1e-5, 1e-5) == 0);
}

TEST_CASE("a module inside that cannot be cloned follows all the same") {
  torch::manual_seed(11);
  Holding net;
  DataParallel<Holding> model(net, on_cpu(3));
  model->forward(whole_rows(6)).square().sum().backward();
  const Values found = gradients_of(*net);
  net->zero_grad();
  net->forward(whole_rows(6)).square().sum().backward();
  CHECK(count_unlike(found, gradients_of(*net), 1e-5, 1e-5) == 0);
  CHECK(replicate(net, model->devices())[1]->inside->weight.is_alias_of(net->inside->weight));
}

TEST_CASE("a gradient of Embedding stays sparse") {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  DataParallel<torch::nn::Embedding> model(net, on_cpu(2));
  model->forward(at::arange(6, at::kLong)).sum().backward();
  REQUIRE(net->weight.grad().is_sparse());
  CHECK(net->weight.grad().to_dense().sum().item<double>() == 18);
}

TEST_CASE("replicas of an embedding that was made of given rows have rows of their own") {
  const at::Tensor rows = at::arange(30, at::kFloat).view({10, 3});
  const auto options = torch::nn::EmbeddingFromPretrainedOptions().freeze(false);
  torch::nn::Embedding net = torch::nn::Embedding::from_pretrained(rows.clone(), options);
  DataParallel<torch::nn::Embedding> model(net, on_cpu(2));
  const at::Tensor output = model->forward(at::arange(6, at::kLong));
  CHECK(at::equal(output, rows.narrow(0, 0, 6)));
  output.sum().backward();
  CHECK(net->weight.grad().sum().item<double>() == 18);
  CHECK(net->options._weight().is_same(net->weight));
}

TEST_CASE("copies of other devices train like shared memory") {
  const auto train_by_hand = [](bool copy_always) {
    auto net = seeded<Layers>();
    const std::vector<c10::Device> devices(2, c10::Device(c10::kCPU));
    ModuleClones clones = clone_module(*net, devices);
    auto pool = std::make_shared<WorkerPool>(devices, std::vector<int>{1, 1});
    pool->start();
    ReplicasOptions options;
    options.copy_always = copy_always;
    const auto replicas = std::make_shared<Replicas>(std::move(clones.tensors), pool, options);
    torch::optim::AdamW optimizer(net->parameters());
    Values values;
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto pass = replicas->begin(8);
      const Values parts = pass->scatter(characters(step, 8), 0);
      std::vector<Values> outputs(2);
      replicas->forward(*pass, [&](size_t position) {
        auto& module = dynamic_cast<LayersImpl&>(*clones.modules[position]);
        outputs[position] = {module.forward(parts[position])};
      });
      pass->gather(outputs, {}).front().square().sum().backward();
      optimizer.step();
      values.push_back(at::full({}, double(replicas->last_step().copied_bytes)));
    }
    for (const at::Tensor& parameter : copies_of(net->parameters())) values.push_back(parameter);
    return values;
  };
  const Values shared = train_by_hand(false);
  Values copied = train_by_hand(true);
  CHECK(copied[0].item<double>() == 0);
  for (const size_t step : {1, 2, 3}) {
    CHECK(shared[step].item<double>() == 0);
    CHECK(copied[step].item<double>() > 0);
    copied[step].zero_();
  }
  CHECK(count_unlike(copied, shared, 0) == 0);
}

}  // namespace trireme::data_parallel_forms_test
