#pragma once

// What a model brings, as rows of pairs_test.cpp.

#include <trireme/activation/checkpoint.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/parameter_server/embedding.h>
#include <trireme/strategies/remote/endpoint.h>
#include <trireme/strategies/sync_batch_norm/sync_batch_norm_module.h>

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <future>
#include <map>
#include <mutex>
#include <semaphore>
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
  void reset() override {
    torch::nn::EmbeddingOptions options(kIds, kWidth);
    options.sparse(sparse)._weight(at::zeros({kIds, kWidth}));
    rows = register_module("rows", torch::nn::Embedding(options));
  }
  at::Tensor forward(const at::Tensor& x) { return x + rows(ids_of(x)); }
  bool sparse;
  torch::nn::Embedding rows{nullptr};
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

// Computes a layer, and then one that may be elsewhere.
struct AfarImpl : torch::nn::Cloneable<AfarImpl>, SendsGradients {
  explicit AfarImpl(torch::nn::Linear here) : here(std::move(here)) { AfarImpl::reset(); }
  explicit AfarImpl(std::shared_ptr<remote::RemoteModule> there) : there(std::move(there)) {
    AfarImpl::reset();
  }
  void reset() override {
    if (here) register_module("here", here);
    inner = register_module("inner", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    return there ? there->forward(inner(x)) : here(inner(x));
  }
  torch::nn::Linear here{nullptr}, inner{nullptr};
  std::shared_ptr<remote::RemoteModule> there;
};
TORCH_MODULE(Afar);

// A loss that is trained, too.
struct TemperedImpl : torch::nn::Module {
  TemperedImpl() { scale = register_parameter("scale", at::full({}, 1.5)); }
  at::Tensor forward(const at::Tensor& output, const at::Tensor& target) {
    return loss_of(output * scale, target);
  }
  at::Tensor scale;
};
TORCH_MODULE(Tempered);

// Who calls other ranks, by rank; none where no cell needs it.
inline std::array<remote::Endpoint*, 2> endpoints{};
inline std::string name_of(int64_t rank) { return "p" + std::to_string(rank); }

struct Made {
  Sequential net;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> loss = loss_of;
  ThreadRank* rank = nullptr;  // where others step what a forward reads, and nowhere else
  Values foreign = {};         // parameters that a server steps, and no optimizer
  Values of_loss = {};         // those of the loss
  // Called before a step and before parameters are read, once for all that a step has pushed, and
  // when a rank has run out of inputs before others have.
  std::function<void()> before = [] {};
  std::function<void()> after = [] {};
  std::function<void()> leave = nullptr;
  // A guard, while parameters are written.
  std::function<std::shared_ptr<void>()> writing = [] { return nullptr; };
  // What is trained elsewhere, in place of the first parameters of one process.
  std::function<Values()> elsewhere = [] { return Values(); };
  Values outputs = {};  // of evaluations, in their order
};

// Where a model is made: on a rank, or in one process, which has none.
struct Place {
  ThreadRank* rank = nullptr;
  double share = 1;                               // is what each who pushes it has of a gradient
  std::shared_ptr<Communicator> meets = nullptr;  // whom layers meet; all ranks if null
};

// Gives parameters equal values on all ranks, whose threads share one generator; those of `kept`
// stay what they are.
inline void fill(const torch::nn::Module& module, const Values& kept = {}) {
  const at::NoGradGuard guard;
  int64_t number = 0;
  for (at::Tensor& parameter : module.parameters()) {
    const auto is_this = [&](const at::Tensor& one) { return one.is_same(parameter); };
    if (parameter.is_complex() || parameter.size(0) == kIds ||
        std::any_of(kept.begin(), kept.end(), is_this))
      continue;
    ++number;
    const at::Tensor places = at::arange(parameter.numel(), at::kDouble) * number;
    parameter.copy_(at::cos(places).view(parameter.sizes()) * 0.4);
  }
}

using Make = std::function<Made(const Place&)>;
using Evaluate = std::function<at::Tensor(int64_t number)>;  // undefined where another rank has it

// A model, and how a program uses it.
struct Row {
  Make make;
  // What lives while a forward runs.
  std::function<std::shared_ptr<void>()> around = [] { return nullptr; };
  // Makes a step.
  std::function<void(ThreadRank* rank, const std::function<void()>&)> run =
      [](ThreadRank*, const auto& step) { step(); };
  // Evaluates batches behind a step, in so many threads at once, or in one.
  std::function<Values(ThreadRank* rank, const Evaluate&, int64_t number, bool together)> evaluate =
      [](ThreadRank*, const auto&, int64_t, bool) { return Values(); };
  // Moves all parameters behind the first step.
  std::function<void(torch::nn::Module&)> move = nullptr;
  bool accumulates = false;  // over two batches, of which the first averages nothing
  bool is_whole = false;     // computes with whole batches on all ranks, not with parts
  bool calls = false;        // other ranks
  double tolerance = 1e-5;
};

inline Made layers(auto first, const Values& kept = {}) {
  Made made{Sequential(first, torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                       torch::nn::Linear(kWidth, kWidth))};
  fill(*made.net, kept);
  return made;
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
    made.rank = place.rank;
    made.after = [server] { server->clock(); };
    made.leave = [server] { server->leave(); };
    made.elsewhere = [server] { return Values{server->sparse("rows").pull(at::arange(kIds))}; };
    return made;
  };
}

// A layer whose parameters are a table.
inline Made bound(const Place& place) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  if (place.rank == nullptr) return made;
  const auto reduction = place.share < 1 ? ps::Reduction::kMean : ps::Reduction::kSum;
  auto server = std::make_shared<ps::ParameterServer>(
      place.rank->communicator,
      std::vector{
          ps::dense("layer", *made.net->ptr(0), ps::SGD{.lr = kRate}, {.reduction = reduction})});
  ps::DenseTable& table = server->dense("layer");
  made.rank = place.rank;
  made.foreign = made.net->ptr(0)->parameters();
  made.before = [&table] { table.pull(); };
  made.after = [server, &table] {
    table.push();
    server->clock();
  };
  made.leave = [server, &table] {
    table.pull();  // what it holds from now on
    server->leave();
  };
  made.writing = [&table] {
    return std::shared_ptr<void>(new auto(table.writing()), [](auto* guard) { delete guard; });
  };
  return made;
}

// The same layer for all callers, who may come at once.
inline torch::nn::Linear layer_afar() {
  static std::mutex mutex;
  static std::weak_ptr<torch::nn::LinearImpl> made;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto known = made.lock()) return torch::nn::Linear(known);
  torch::nn::Linear layer(kWidth, kWidth);
  fill(*layer);
  made = layer.ptr();
  return layer;
}

inline Made remote_layer(const Place& place) {
  if (place.rank == nullptr) {
    const torch::nn::Linear here = layer_afar();
    return layers(Afar(here), here->parameters());
  }
  const auto [rank, world] = place.rank->where;
  const auto there =
      std::make_shared<remote::RemoteModule>(endpoints[static_cast<size_t>(rank)]->module(
          name_of(world - 1), "layer_of_pairs", {.optimizer = SgdSpec{kRate * place.share, 0, 0}}));
  Made made = layers(Afar(there));
  made.rank = place.rank;
  made.after = [there] {
    there->step();
    there->zero_grad();
  };
  made.elsewhere = [there] {
    Values found;
    for (const auto& [name, value] : there->state()) found.push_back(value);
    return found;
  };
  return made;
}

inline Made with_loss(const Place& /*place*/) {
  Made made = layers(torch::nn::Linear(kWidth, kWidth));
  Tempered loss;
  made.loss = [loss](const at::Tensor& output, const at::Tensor& target) mutable {
    return loss->forward(output, target);
  };
  made.of_loss = loss->parameters();
  return made;
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
  row.evaluate = [](ThreadRank*, const Evaluate& evaluate, int64_t number, bool /*together*/) {
    const c10::InferenceMode guard;
    return Values{evaluate(number)};
  };
  return row;
}

inline constexpr int64_t kCalls = 3;

// Evaluations, at once where a rank may run the model while others do something else.
inline Values evaluations(const Evaluate& evaluate, int64_t number, bool together) {
  std::vector<std::future<at::Tensor>> calls;
  for (int64_t call = 0; call < kCalls; ++call) {
    calls.push_back(std::async(std::launch::async, evaluate, number + 10 * call));
    if (together) calls.back().wait();
  }
  Values found;
  for (auto& call : calls) found.push_back(call.get());
  return found;
}

// Each step in a thread of its own, and three evaluations at once.
inline Row from_threads() {
  Row row = plain();
  row.run = [](ThreadRank*, const auto& step) { std::async(std::launch::async, step).get(); };
  row.evaluate = [](ThreadRank*, const Evaluate& evaluate, int64_t number, bool together) {
    return evaluations(evaluate, number, together);
  };
  return row;
}

// What ranks do for others that call them, by rank.
struct Served {
  std::function<void()> step;
  Evaluate evaluate;
  std::counting_semaphore<> answered{0};
};
inline std::array<Served, 2> served_by{};

// Defines what ranks call; once in a process.
inline void define_for_calls() {
  static const bool once = [] {
    remote::define_module("layer_of_pairs", &layer_afar);
    remote::define("step_of_pairs", [](int64_t rank) {
      Served& served = served_by[static_cast<size_t>(rank)];
      const auto answer = c10::make_scope_exit([&] { served.answered.release(); });
      served.step();
    });
    remote::define("evaluate_of_pairs", [](int64_t rank, int64_t number) {
      Served& served = served_by[static_cast<size_t>(rank)];
      const auto answer = c10::make_scope_exit([&] { served.answered.release(); });
      const at::Tensor output = served.evaluate(number);
      return output.defined() ? std::optional(output) : std::nullopt;
    });
    return true;
  }();
  static_cast<void>(once);
}

// Waits for other ranks: nobody leaves while calls that it has to answer are under way.
inline void call_next(ThreadRank& rank, int64_t calls,
                      const std::function<void(int64_t next)>& call) {
  rank.communicator->barrier("before calls").wait();
  call((rank.where.rank + 1) % rank.where.world);
  auto& answered = served_by[static_cast<size_t>(rank.where.rank)].answered;
  for (int64_t one = 0; one < calls; ++one) answered.acquire();
  rank.communicator->barrier("after calls").wait();
}

// The next rank asks for each step, and for three evaluations at once.
inline Row from_afar() {
  Row row = plain();
  row.calls = true;
  row.run = [](ThreadRank* rank, const auto& step) {
    if (rank == nullptr) return step();
    const auto own = static_cast<size_t>(rank->where.rank);
    served_by[own].step = step;
    call_next(*rank, 1,
              [own](int64_t next) { endpoints[own]->call(name_of(next), "step_of_pairs", next); });
  };
  row.evaluate = [](ThreadRank* rank, const Evaluate& evaluate, int64_t number, bool together) {
    if (rank == nullptr) return evaluations(evaluate, number, together);
    const auto own = static_cast<size_t>(rank->where.rank);
    served_by[own].evaluate = evaluate;
    Values found;
    call_next(*rank, kCalls, [&](int64_t next) {
      const auto ask = [next, own](int64_t asked) {
        return endpoints[own]
            ->call<std::optional<at::Tensor>>(name_of(next), "evaluate_of_pairs", next, asked)
            .value_or(at::Tensor());
      };
      found = evaluations(ask, number, together);
    });
    return found;
  };
  return row;
}

inline Row calling(Make make) {
  Row row{std::move(make)};
  row.calls = true;
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
    {"a dense table", {bound}},
    {"RemoteModule", calling(remote_layer)},
    {"a remote function", from_afar()},
    {"a loss with parameters", {with_loss}},
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
