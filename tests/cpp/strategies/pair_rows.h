#pragma once

// What a model brings, as rows of pairs_test.cpp.

#include <trireme/activation/checkpoint.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/parameter_server/embedding.h>
#include <trireme/strategies/sync_batch_norm/sync_batch_norm_module.h>

#include <ATen/autocast_mode.h>

#include <future>
#include <map>
#include <strategies/fsdp/fsdp_ranks.h>
#include <string>

namespace trireme::pairs_test {

using namespace trireme::test;
using torch::nn::Sequential;
inline constexpr int64_t kWidth = 6, kIds = 5, kBatch = 8, kSteps = 3, kChunks = 2;
inline constexpr double kRate = 0.125;

inline at::Tensor batch(int64_t number) {
  const at::Tensor places = at::arange(kBatch * kWidth, at::kDouble).view({kBatch, kWidth});
  return at::sin(places * static_cast<double>(number + 1)).to(at::kFloat);
}

inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

inline at::Tensor ids_of(const at::Tensor& x) {
  return (x.detach().select(1, 0).abs() * 3).to(at::kLong).clamp_max(kIds - 1);
}

// Adds rows of its own by ids that are computed from its input.
struct OwnRowsImpl : torch::nn::Cloneable<OwnRowsImpl> {
  explicit OwnRowsImpl(bool sparse = false) : sparse(sparse) { OwnRowsImpl::reset(); }
  void reset() override { rows = register_parameter("rows", at::zeros({kIds, kWidth})); }
  at::Tensor forward(const at::Tensor& x) {
    return x + at::embedding(rows, ids_of(x), /*padding_idx=*/-1, false, sparse);
  }
  bool sparse;
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

// A layer that averages its gradients itself.
struct AveragedImpl : torch::nn::Module {
  explicit AveragedImpl(std::shared_ptr<Communicator> communicator) {
    const torch::nn::Linear layer(kWidth, kWidth);
    inner = register_module(
        "inner", DistributedDataParallel<torch::nn::Linear>(layer, std::move(communicator)));
  }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  DistributedDataParallel<torch::nn::Linear> inner{nullptr};
};
TORCH_MODULE(Averaged);

// Two layers that have one matrix.
struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { TiedImpl::reset(); }
  void reset() override {
    there = register_module("there", torch::nn::Linear(kWidth, kWidth));
    back = register_parameter("back", there->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(torch::tanh(there(x)), back.t()); }
  torch::nn::Linear there{nullptr};
  at::Tensor back;
};
TORCH_MODULE(Tied);

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
  ThreadRank* rank = nullptr;  // serves where there is a server
  Values outputs = {};         // of evaluations, in their order
};

// Where a model is made: on a rank, or in one process, which has none.
struct Place {
  ThreadRank* rank = nullptr;
  double share = 1;                               // is what each who pushes it has of a gradient
  std::shared_ptr<Communicator> meets = nullptr;  // whom layers meet; all ranks if null
};

using Make = std::function<Made(const Place&)>;
using Evaluate = std::function<at::Tensor(int64_t number)>;  // undefined where another rank has it

// A model, and how a program uses it.
struct Row {
  Make make;
  // What lives while a forward runs.
  std::function<std::shared_ptr<void>()> around = [] { return nullptr; };
  // Makes a step.
  std::function<void(const std::function<void()>&)> run = [](const auto& step) { step(); };
  // Evaluates batches behind a step, in so many threads at once, or in one.
  std::function<Values(const Evaluate&, int64_t number, bool together)> evaluate =
      [](const auto&, int64_t, bool) { return Values(); };
  // Moves all parameters behind the first step.
  std::function<void(torch::nn::Module&)> move = nullptr;
  bool accumulates = false;  // over two batches, of which the first averages nothing
  bool is_whole = false;     // computes with whole batches on all ranks, not with parts
  double tolerance = 1e-5;
};

inline Made layers(auto first) {
  return {Sequential(first, torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                     torch::nn::Linear(kWidth, kWidth))};
}

inline Make simply(auto make) {
  return [make](const Place& /*place*/) { return layers(make()); };
}

inline Make served(ps::Mode mode) {
  return [mode](const Place& place) {
    if (place.rank == nullptr) return layers(OwnRows());
    auto server = std::make_shared<ps::ParameterServer>(
        place.rank->communicator,
        std::vector{ps::sparse("rows", kWidth, ps::SGD{.lr = kRate * place.share},
                               {.reduction = ps::Reduction::kSum})},
        ps::Options{.mode = mode});
    Made made = layers(ServedRows(server->shared_sparse("rows")));
    made.server = std::move(server);
    made.rank = place.rank;
    return made;
  };
}

inline Made frozen(const Place& /*place*/) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  for (const at::Tensor& parameter : made.net->ptr(0)->parameters())
    parameter.set_requires_grad(false);
  return made;
}

inline Made hooked(const Place& /*place*/) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  for (const at::Tensor& parameter : made.net->parameters())
    parameter.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
  return made;
}

inline Made sparse(const Place& place) { return layers(OwnRows(place.rank != nullptr)); }

inline Made synchronized(const Place& place) {
  if (place.rank == nullptr) return layers(torch::nn::BatchNorm1d(kWidth));
  return layers(SyncBatchNorm(SyncBatchNormOptions(kWidth),
                              place.meets ? place.meets : place.rank->communicator));
}

// The layer alone averages over the ranks that have it.
inline Made averaged_inside(const Place& place) {
  if (place.rank == nullptr) return layers(torch::nn::Linear(kWidth, kWidth));
  return layers(Averaged(place.meets ? place.meets : place.rank->communicator));
}

inline Row plain() {
  return {simply([] { return torch::nn::Linear(kWidth, kWidth); })};
}

inline Row autocast() {
  struct Guard {
    Guard() { at::autocast::set_autocast_enabled(at::kCPU, true); }
    ~Guard() {
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
  };
  Row row = plain();
  row.around = [] { return std::make_shared<Guard>(); };
  row.tolerance = 2e-2;
  return row;
}

inline Row inferring() {
  Row row = plain();
  row.evaluate = [](const Evaluate& evaluate, int64_t number, bool /*together*/) {
    const c10::InferenceMode guard;
    return Values{evaluate(number)};
  };
  return row;
}

// Each step in a thread of its own, and three evaluations at once.
inline Row from_threads() {
  Row row = plain();
  row.run = [](const auto& step) { std::async(std::launch::async, step).get(); };
  row.evaluate = [](const Evaluate& evaluate, int64_t number, bool together) {
    std::vector<std::future<at::Tensor>> calls;
    for (int64_t call = 0; call < 3; ++call) {
      calls.push_back(std::async(std::launch::async, evaluate, number + 10 * call));
      if (together) calls.back().wait();
    }
    Values found;
    for (auto& call : calls) found.push_back(call.get());
    return found;
  };
  return row;
}

inline Row accumulating() {
  Row row = plain();
  row.accumulates = true;
  return row;
}

// As torch::load() and to() give parameters other memory.
inline Row moving() {
  Row row = plain();
  row.move = [](torch::nn::Module& net) {
    for (at::Tensor& parameter : net.parameters()) parameter.set_data(parameter.data() * 0.5);
  };
  return row;
}

inline Row whole(Make make) {
  Row row{std::move(make)};
  row.is_whole = true;
  return row;
}

inline const std::map<std::string, Row> kRows{
    {"rows of a server, bsp", {served(ps::Mode::kBsp)}},
    {"rows of a server, ssp", {served(ps::Mode::kSsp)}},
    {"rows of a server, async", {served(ps::Mode::kAsync)}},
    {"SyncBatchNorm", whole(synchronized)},
    {"BatchNorm", {simply([] { return torch::nn::BatchNorm1d(kWidth); })}},
    {"tied parameters", {simply([] { return Tied(); })}},
    {"sparse gradients", {sparse}},
    {"checkpoint, offloaded",
     {simply([] { return Again(CheckpointOptions{.offload = ActivationOffload{}}); })}},
    {"a first layer in place",
     {simply([] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); })}},
    {"frozen parameters", {frozen}},
    {"hooks of parameters", {hooked}},
    {"checkpoint", {simply([] { return Again(CheckpointOptions{}); })}},
    {"complex parameters", {simply([] { return Phases(); })}},
    {"a lazy minus", {simply([] { return LazyMinus(); })}},
    {"autocast", autocast()},
    {"inference mode", inferring()},
    {"several threads of the user's", from_threads()},
    {"no_sync", accumulating()},
    {"DistributedDataParallel inside", {averaged_inside}},
    {"moved parameters", moving()}};

}  // namespace trireme::pairs_test
