// Two parts together, where C++ has both: tests/python/contract/pairs.py has the whole table. Rows
// are what a model brings, columns what runs it; each cell equals one process on whole batches, or
// is refused with its text.
#include <trireme/comm/threads/thread_group.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/data_parallel/data_parallel.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/remote/endpoint.h>

#include <algorithm>
#include <strategies/pair_rows.h>
#include <temporary_folder.h>

namespace trireme::pairs_test {

using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

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

// Each tensor once, however often it is registered.
Values trained(const Values& parameters) {
  Values found;
  for (const at::Tensor& parameter : parameters) {
    const auto is_this = [&](const at::Tensor& known) { return known.is_same(parameter); };
    if (parameter.requires_grad() && std::none_of(found.begin(), found.end(), is_this))
      found.push_back(parameter);
  }
  return found;
}

// Waits until all are here: under ssp and async nobody else does, and pulls see what others push.
void meet(const Made& made) {
  if (made.server) made.rank->communicator->barrier("clock").wait();
}

void end_clock(const Made& made, bool meets = true) {
  if (made.server) made.server->clock();
  if (meets) meet(made);
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

// Says how one process cuts its batches, whose parts' losses are divided by `parts`.
struct Cut {
  int64_t parts = 1;
  bool drops_last = false;  // whether the last batch lacks its last part
};

Values alone(const Make& make, Cut cut) {
  Made made = made_by(make, {});
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const int64_t parts = cut.parts - int64_t{cut.drops_last && step == kSteps - 1};
    const auto inputs = batch(step).tensor_split(cut.parts);
    const auto targets = batch(step + 40).tensor_split(cut.parts);
    for (size_t at = 0; at < static_cast<size_t>(parts); ++at) {
      const at::Tensor output = made.net->forward(inputs[at].clone());
      (loss_of(output, targets[at]) / static_cast<double>(cut.parts)).backward();
    }
    optimizer.step();
  }
  return values_of(made.net->parameters());
}

// Trains `net`, which is called, on this rank's part of each batch.
void train(auto& net, const Made& made, torch::optim::Optimizer& optimizer, RankOf where) {
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = net->forward(part(batch(step), where));
    meet(made);
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

Values zero_1(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  ZeroRedundancyOptimizer<SGD> optimizer(made.net, SGDOptions(kRate), rank.communicator,
                                         ZeroOptions{.stage = 1});
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
    meet(made);
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

Values working(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  ps::ParameterServer server(rank.communicator,
                             {ps::dense("model", made.net, ps::SGD{.lr = kRate})});
  for (int64_t step = 0; step < kSteps; ++step) {
    made.net->zero_grad();
    server.dense("model").pull();
    const at::Tensor output = made.net->forward(part(batch(step), rank.where));
    meet(made);
    loss_of(output, part(batch(step + 40), rank.where)).backward();
    rank.communicator->barrier("backward").wait();  // who refuses the push leaves
    end_clock(made);
    server.dense("model").push();
    server.clock();
  }
  server.dense("model").pull();
  return seen(made, made.net->parameters());
}

// Saves behind the second step, and loads into a model of zeros.
Values saved(ThreadRank& rank, const Make& make, const std::string& folder) {
  Made made = made_by(make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = net->forward(part(batch(step), rank.where));
    meet(made);
    loss_of(output, part(batch(step + 40), rank.where)).backward();
    end_clock(made);
    optimizer.step();
    if (step != 1) continue;
    save_checkpoint(folder, *made.net,
                    {.optimizer = &optimizer, .communicator = rank.communicator});
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : made.net->parameters()) parameter.zero_();
    }
    load_checkpoint(folder, *made.net,
                    {.optimizer = &optimizer, .communicator = rank.communicator});
  }
  return seen(made, made.net->parameters());
}

// The second rank has one batch less, and then leaves its server.
Values joined(ThreadRank& rank, const Make& make) {
  Made made = made_by(make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  net->join([&] {
    for (int64_t step = 0; step < kSteps - rank.where.rank; ++step) {
      optimizer.zero_grad();
      const at::Tensor output = net->forward(part(batch(step), rank.where));
      const bool alone = step == kSteps - 1;
      if (!alone) meet(made);
      loss_of(output, part(batch(step + 40), rank.where)).backward();
      end_clock(made, !alone);
      optimizer.step();
    }
    if (made.server && rank.where.rank > 0) made.server->leave();
  });
  if (!made.server || rank.where.rank == 0) return seen(made, made.net->parameters());
  Values found = values_of(made.net->parameters());
  found.insert(found.begin(), at::Tensor());  // stands for the rows
  return found;
}

std::shared_ptr<torch::nn::SequentialImpl> owned;

// The first rank calls the model of the second one.
Values owned_elsewhere(ThreadRank& rank, const Make& make) {
  static const bool is_defined = [] {
    remote::define_module("model_of_pairs", [] { return Sequential(owned); });
    return true;
  }();
  TORCH_CHECK(is_defined);
  const bool calls = rank.where.rank == 0;
  Made made = made_by(make, {&rank, 1, ThreadGroup(1).communicator(0)});
  remote::Endpoint endpoint(rank.communicator, calls ? "caller" : "owner");
  if (!calls) owned = made.net.ptr();
  const auto all_meet = [&] { rank.communicator->barrier("step").wait(); };
  all_meet();
  std::optional<remote::RemoteModule> net;
  if (calls) net = endpoint.module("owner", "model_of_pairs", {.optimizer = SgdSpec{kRate, 0, 0}});
  for (int64_t step = 0; step < kSteps; ++step) {
    if (calls) {
      net->zero_grad();
      loss_of(net->forward(batch(step)), batch(step + 40)).backward();
    }
    all_meet();
    end_clock(made);
    if (calls) net->step();
    all_meet();
  }
  Values found = seen(made, made.net->parameters());
  if (calls) {
    const auto state = net->state();
    const size_t rows = found.size() - made.net->parameters().size();
    for (size_t at = rows; at < found.size(); ++at) found[at] = state[at - rows].second;
  }
  net.reset();
  endpoint.stop();
  return found;
}

struct Column {
  std::string name;
  int64_t world;
  std::function<Values(ThreadRank&, const Make&)> train;
  Cut cut = {};
  bool is_cut = false;  // whether a rank has some layers only
};

std::string folder;  // the cell that is filled saves there

const std::vector<Column> kColumns{
    {"DDP", 2, ddp},
    {"ZeRO 1", 2, zero_1},
    {"ZeRO 2", 2, zero_2},
    {"fully_shard", 2, sharded},
    {"DataParallel", 1, replicated},
    {"checkpoint", 2, checkpointed},
    {"Pipeline, ranks",
     2,
     [](auto& rank, auto& make) { return piped(rank, make, {}); },
     {kChunks},
     true},
    {"Pipeline, threads",
     1,
     [](auto& rank, auto& make) { return piped(rank, make, {.ranks = false, .threads = 2}); },
     {kChunks}},
    {"remote owner", 2, owned_elsewhere},
    {"worker", 2, working},
    {"save_checkpoint", 2, [](auto& rank, auto& make) { return saved(rank, make, folder); }},
    {"Join", 2, joined, {2, true}}};

// What is refused, and with which text.
const std::map<std::pair<std::string, std::string>, std::string> kRefused{
    {{"a first layer in place", "checkpoint"}, "modified by an inplace operation"},
    {{"SyncBatchNorm", "DataParallel"}, "[data_parallel] got SyncBatchNormImpl at '0'"},
    {{"SyncBatchNorm", "Pipeline, ranks"}, "[pipeline] got SyncBatchNormImpl at '0' over ranks"},
    {{"SyncBatchNorm", "Join"}, "[ddp] got SyncBatchNormImpl at '0' under join()"},
    {{"complex parameters", "worker"}, "[ps] got table 'model' with '0.phase' of dtype"},
    {{"sparse gradients", "worker"}, "[ps] push: got a gradient of layout Sparse for '0.rows'"}};

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
  const TemporaryFolder temporary;
  folder = temporary.at("checkpoint");
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
      return !one.found[i].defined() || at::allclose(one.found[i], expected[i], 1e-5, 1e-5);
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
    for (const Column& column : kColumns) {
      CAPTURE(column.name, row);
      CHECK(complaint(column, row, alone(make, column.cut)) == "");
    }
  }
}

}  // namespace trireme::pairs_test
