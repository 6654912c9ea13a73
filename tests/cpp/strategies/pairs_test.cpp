// Two parts together, where C++ has both: tests/python/contract/pairs.py has the whole table. Rows
// are what a model brings, columns what runs it; each cell equals one process on whole batches, or
// is refused with its text.
#include <trireme/activation/checkpoint.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/data_parallel/data_parallel.h>
#include <trireme/strategies/parameter_server/embedding.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <algorithm>
#include <map>
#include <strategies/fsdp/fsdp_ranks.h>

namespace trireme::pairs_test {

using namespace trireme::test;
using torch::nn::Sequential;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

constexpr int64_t kWidth = 6, kIds = 5, kBatch = 8, kSteps = 3, kChunks = 2;
constexpr double kRate = 0.125;

at::Tensor batch(int64_t number) {
  const at::Tensor places = at::arange(kBatch * kWidth, at::kDouble).view({kBatch, kWidth});
  return at::sin(places * static_cast<double>(number + 1)).to(at::kFloat);
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

at::Tensor ids_of(const at::Tensor& x) {
  return (x.detach().select(1, 0).abs() * 3).to(at::kLong).clamp_max(kIds - 1);
}

// Adds rows of its own by ids that are computed from its input.
struct OwnRowsImpl : torch::nn::Cloneable<OwnRowsImpl> {
  OwnRowsImpl() { OwnRowsImpl::reset(); }
  void reset() override { rows = register_parameter("rows", at::zeros({kIds, kWidth})); }
  at::Tensor forward(const at::Tensor& x) { return x + at::embedding(rows, ids_of(x)); }
  at::Tensor rows;
};
TORCH_MODULE(OwnRows);

// Adds those of a server.
struct ServedRowsImpl : torch::nn::Cloneable<ServedRowsImpl>, SendsGradients {
  explicit ServedRowsImpl(std::shared_ptr<ps::SparseTable> table) : table(std::move(table)) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) {
    return x + ps::pull_with_gradient(table, ids_of(x), is_training());
  }
  std::shared_ptr<ps::SparseTable> table;
};
TORCH_MODULE(ServedRows);

// Computes a layer again in the backward.
struct AgainImpl : torch::nn::Cloneable<AgainImpl> {
  explicit AgainImpl(CheckpointOptions options) : options(std::move(options)) {
    AgainImpl::reset();
  }
  void reset() override { inner = register_module("inner", torch::nn::Linear(kWidth, kWidth)); }
  at::Tensor forward(const at::Tensor& x) { return checkpoint(options, inner, x).tanh(); }
  CheckpointOptions options;
  torch::nn::Linear inner{nullptr};
};
TORCH_MODULE(Again);

// Turns pairs of numbers by complex parameters.
struct PhasesImpl : torch::nn::Cloneable<PhasesImpl> {
  PhasesImpl() { PhasesImpl::reset(); }
  void reset() override {
    phase = register_parameter("phase", at::ones({kWidth / 2}, at::kComplexFloat));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor pairs = at::view_as_complex(x.reshape({x.size(0), -1, 2}).contiguous());
    return at::view_as_real(pairs * phase).flatten(1);
  }
  at::Tensor phase;
};
TORCH_MODULE(Phases);

// Hands on what has torch's lazy minus.
struct LazyMinusImpl : torch::nn::Cloneable<LazyMinusImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return at::_neg_view(-x); }
};
TORCH_MODULE(LazyMinus);

struct Made {
  Sequential net;
  std::shared_ptr<ps::ParameterServer> server = nullptr;
};

// Where a model is made: on a rank, or in one process, which has none.
struct Place {
  ThreadRank* rank = nullptr;
  double share = 1;  // is what each of those who push it has of a gradient
};

using Make = std::function<Made(const Place&)>;

Made layers(auto first) {
  return {Sequential(first, torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                     torch::nn::Linear(kWidth, kWidth))};
}

Make simply(auto make) {
  return [make](const Place& /*place*/) { return layers(make()); };
}

Make served(ps::Mode mode) {
  return [mode](const Place& place) {
    if (place.rank == nullptr) return layers(OwnRows());
    auto server = std::make_shared<ps::ParameterServer>(
        place.rank->communicator,
        std::vector{ps::sparse("rows", kWidth, ps::SGD{.lr = kRate * place.share},
                               {.reduction = ps::Reduction::kSum})},
        ps::Options{.mode = mode});
    Made made = layers(ServedRows(server->shared_sparse("rows")));
    made.server = std::move(server);
    return made;
  };
}

Made frozen(const Place& /*place*/) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  for (const at::Tensor& parameter : made.net->ptr(0)->parameters())
    parameter.set_requires_grad(false);
  return made;
}

Made hooked(const Place& /*place*/) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  for (const at::Tensor& parameter : made.net->parameters())
    parameter.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
  return made;
}

const std::map<std::string, Make> kRows{
    {"rows of a server, bsp", served(ps::Mode::kBsp)},
    {"a first layer in place",
     simply([] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); })},
    {"frozen parameters", frozen},
    {"hooks of parameters", hooked},
    {"checkpoint", simply([] { return Again(CheckpointOptions{}); })},
    {"complex parameters", simply([] { return Phases(); })},
    {"a lazy minus", simply([] { return LazyMinus(); })}};

// Gives parameters equal values on all ranks, whose threads share one generator.
void fill(const Sequential& net) {
  const at::NoGradGuard guard;
  int64_t number = 0;
  for (at::Tensor& parameter : net->parameters()) {
    if (parameter.is_complex() || parameter.size(0) == kIds) continue;  // stays what it was
    ++number;
    const at::Tensor places = at::arange(parameter.numel(), at::kDouble) * number;
    parameter.copy_(at::cos(places).view(parameter.sizes()) * 0.4);
  }
}

Made made_by(const Make& make, const Place& place) {
  Made made = make(place);
  fill(made.net);
  return made;
}

Values trained(const Values& parameters) {
  Values found;
  for (const at::Tensor& parameter : parameters)
    if (parameter.requires_grad()) found.push_back(parameter);
  return found;
}

void end_clock(const Made& made) {
  if (made.server) made.server->clock();
}

// What was trained: the model's parameters, and before them those of a server.
Values seen(const Made& made, const Values& parameters) {
  Values found;
  if (made.server) found.push_back(made.server->sparse("rows").pull(at::arange(kIds)));
  for (const at::Tensor& parameter : values_of(parameters)) found.push_back(parameter);
  return found;
}

at::Tensor part(const at::Tensor& whole, RankOf where) {
  return whole.tensor_split(where.world)[static_cast<size_t>(where.rank)].clone();
}

Values alone(const Make& make) {
  Made made = made_by(make, {});
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(made.net->forward(batch(step)), batch(step + 40)).backward();
    optimizer.step();
  }
  return values_of(made.net->parameters());
}

// Trains `net`, which is called, on this rank's part of each batch.
void train(auto& net, const Made& made, torch::optim::Optimizer& optimizer, RankOf where) {
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = net->forward(part(batch(step), where));
    loss_of(output, part(batch(step + 40), where)).backward();
    end_clock(made);
    trireme::step(optimizer);
  }
}

Values ddp(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  train(net, made, optimizer, rank.where);
  return seen(made, made.net->parameters());
}

Values zero_2(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  ZeroRedundancyOptimizer<SGD> optimizer(made.net, SGDOptions(kRate), rank.communicator,
                                         ZeroOptions{.stage = 2});
  train(made.net, made, optimizer, rank.where);
  return seen(made, made.net->parameters());
}

Values sharded(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  auto model = fully_shard(made.net, over(rank));
  SGD optimizer(trained(model->parameters()), SGDOptions(kRate));
  train(model, made, optimizer, rank.where);
  return seen(made, whole_values(*model, made.net->parameters()));
}

Values replicated(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank});
  DataParallelOptions options;
  options.replicas = 2;
  DataParallel<Sequential> net(made.net, options);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  train(net, made, optimizer, {0, 1});
  return seen(made, made.net->parameters());
}

Values checkpointed(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto run = [&](const at::Tensor& x) { return net->forward(x); };
    const at::Tensor output = checkpoint(run, part(batch(step), rank.where));
    loss_of(output, part(batch(step + 40), rank.where)).backward();
    end_clock(made);
    optimizer.step();
  }
  return seen(made, made.net->parameters());
}

Values piped(ThreadRank& rank, const Make& make, PipelineOptions options) {
  options.chunks = kChunks;
  options.schedule = "1f1b";
  Made made = made_by(make, {&rank});
  Pipeline<> pipe(made.net, rank.communicator, options);
  const Values own = trained(pipe->parameters());
  SGD optimizer(own.empty() ? Values{at::zeros({1}).requires_grad_()} : own, SGDOptions(kRate));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    pipe->step(batch(step), batch(step + 40), loss_of);
    end_clock(made);
    optimizer.step();
  }
  // Layers of other ranks stay as they are.
  return seen(made, made.net->parameters());
}

struct Column {
  std::string name;
  int64_t world;
  std::function<Values(ThreadRank&, const Make&)> train;
  bool is_cut = false;  // whether a rank has some layers only
};

const std::vector<Column> kColumns{
    {"DDP", 2, ddp},
    {"ZeRO 2", 2, zero_2},
    {"fully_shard", 2, sharded},
    {"DataParallel", 1, replicated},
    {"checkpoint", 2, checkpointed},
    {"Pipeline, ranks", 2, [](auto& rank, auto& make) { return piped(rank, make, {}); }, true},
    {"Pipeline, threads", 1,
     [](auto& rank, auto& make) { return piped(rank, make, {.ranks = false, .threads = 2}); }}};

// What is refused, and with which text.
const std::map<std::pair<std::string, std::string>, std::string> kRefused{
    {{"a first layer in place", "checkpoint"}, "modified by an inplace operation"}};

// What a rank has trained, or what it raised.
struct Outcome {
  Values found;
  std::string text;
};

Outcome outcome(ThreadRank& rank, const Column& column, const Make& make) {
  try {
    return {column.train(rank, make), ""};
  } catch (const std::exception& error) {
    return {{}, error.what()};
  }
}

// What is wrong with a cell; nothing, if it is as it should be.
std::string complaint(const Column& column, const std::string& row, const Values& expected) {
  const auto outcomes = on_shm_ranks<Outcome>(
      column.world, [&](ThreadRank& rank) { return outcome(rank, column, kRows.at(row)); });
  const auto refused = kRefused.find({row, column.name});
  for (const Outcome& one : outcomes) {
    const bool is_refused = refused != kRefused.end();
    if (is_refused != !one.text.empty() ||
        (is_refused && one.text.find(refused->second) == std::string::npos))
      return one.text.empty() ? "is not refused" : one.text;
    if (!is_refused && one.found.size() != expected.size()) return "has other tensors";
  }
  if (refused != kRefused.end()) return "";
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto is_right = [&](const Outcome& one) {
      return at::allclose(one.found[i], expected[i], 1e-5, 1e-5);
    };
    // A rank of a pipeline trains some layers, and the others are what they were.
    const bool right = column.is_cut ? std::any_of(outcomes.begin(), outcomes.end(), is_right)
                                     : std::all_of(outcomes.begin(), outcomes.end(), is_right);
    if (!right) return "tensor " + std::to_string(i) + " differs";
  }
  return "";
}

}  // namespace

TEST_CASE("what goes together is right, or refused by name") {
  for (const auto& [row, make] : kRows) {
    const Values expected = alone(make);
    for (const Column& column : kColumns) {
      CAPTURE(column.name, row);
      CHECK(complaint(column, row, expected) == "");
    }
  }
}

}  // namespace trireme::pairs_test
