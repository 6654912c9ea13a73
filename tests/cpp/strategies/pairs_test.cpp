// Two parts together, where C++ has both: tests/python/contract/pairs.py has the whole table. Rows
// are what a model brings, columns what runs it; each cell equals one process on whole batches, or
// is refused with its text.
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/comm/threads/thread_group.h>
#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/pipetransformer/pipe_transformer.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/data_parallel/data_parallel.h>
#include <trireme/strategies/local_sgd/module_rounds.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/pipeline_stage.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <set>
#include <strategies/pair_rows.h>
#include <temporary_folder.h>

namespace trireme::pairs_test {

using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

// Those that train, each once, however often it is registered.
Values trained(const Values& parameters, const Values& foreign = {}) {
  Values found;
  for (const at::Tensor& parameter : parameters) {
    const auto is_this = [&](const at::Tensor& known) { return known.is_same(parameter); };
    if (parameter.requires_grad() && std::none_of(found.begin(), found.end(), is_this) &&
        std::none_of(foreign.begin(), foreign.end(), is_this))
      found.push_back(parameter);
  }
  return found;
}

// The parameters that an optimizer of the program steps.
Values own_of(const Made& made) {
  Values all = made.net->parameters();
  all.insert(all.end(), made.of_loss.begin(), made.of_loss.end());
  return trained(all, made.foreign);
}

SGD sgd(const Values& own) {
  return SGD(own.empty() ? Values{at::zeros({1}).requires_grad_()} : own, SGDOptions(kRate));
}

// Waits until all are here, where others step what a forward reads.
void meet(const Made& made) {
  if (made.rank != nullptr) made.rank->communicator->barrier("clock").wait();
}

void end_clock(const Made& made, bool meets = true) {
  if (meets) meet(made);
  made.after();
  if (meets) meet(made);
}

// What was trained, elsewhere, in the model and in the loss, and what was evaluated.
Values seen(const Made& made, const Values& parameters) {
  Values found = made.elsewhere();
  for (const Values& all : {values_of(parameters), values_of(made.of_loss), made.outputs})
    found.insert(found.end(), all.begin(), all.end());
  return found;
}

// The same, of what the model holds by itself.
Values seen(const Made& made) {
  made.before();
  return seen(made, made.net->parameters());
}

at::Tensor part(const at::Tensor& whole, RankOf where) {
  return whole.tensor_split(where.world)[static_cast<size_t>(where.rank)].clone();
}

// Says how the ranks, or a schedule, cut batches, whose parts' losses are divided by `parts`.
struct Cut {
  int64_t parts = 2;
  bool is_by_ranks = true;
  bool drops_last = false;  // whether the last batch lacks its last part
};

// What a column does in a step, and how it runs the model otherwise.
struct Program {
  std::function<void(int64_t step)> step;
  Evaluate evaluate;
  std::function<std::shared_ptr<void>()> writing = [] { return nullptr; };
  bool together = false;   // whether a forward needs all ranks
  int64_t steps = kSteps;  // of this rank
};

void run(const Row& row, Made& made, const Program& program, ThreadRank* rank = nullptr) {
  for (int64_t step = 0; step < kSteps; ++step) {
    const bool has_inputs = step < program.steps;
    if (has_inputs) {
      row.run(rank, [&] {
        made.before();
        program.step(step);
      });
    }
    const auto evaluate = [&](int64_t number) {
      if (!has_inputs) return at::Tensor();
      const at::NoGradGuard guard;
      const auto around = row.around();
      return program.evaluate(number);
    };
    for (at::Tensor& output : row.evaluate(rank, evaluate, step + 20, program.together))
      made.outputs.push_back(std::move(output));
    if (step > 0 || !row.move) continue;
    const auto writing = program.writing();
    row.move(*made.net);
  }
}

// A forward and a backward of each batch of a step; `no_sync` lives for all but the last.
void backward(const Row& row, int64_t step, const auto& no_sync, const auto& of_batch) {
  if (row.accumulates) {
    [[maybe_unused]] const auto guard = no_sync();
    of_batch(step + 50);
  }
  of_batch(step);
}

constexpr auto kNothing = [] { return 0; };

Values alone(const Row& row, Cut cut, bool shows_losses) {
  if (row.is_whole && cut.is_by_ranks && !cut.drops_last) cut.parts = 1;
  Made made = row.make({});
  SGD optimizer = sgd(own_of(made));
  int64_t parts = cut.parts;
  const auto of_batch = [&](int64_t number) {
    const auto inputs = batch(number).tensor_split(cut.parts);
    const auto targets = batch(number + 40).tensor_split(cut.parts);
    for (size_t at = 0; at < static_cast<size_t>(parts); ++at) {
      auto around = row.around();
      const at::Tensor output = made.net->forward(inputs[at].clone());
      const at::Tensor loss = made.loss(output, targets[at]) / static_cast<double>(cut.parts);
      around.reset();
      loss.backward();
    }
  };
  run(row, made,
      {[&](int64_t step) {
         optimizer.zero_grad();
         parts -= int64_t{cut.drops_last && step == kSteps - 1};
         backward(row, step, kNothing, of_batch);
         optimizer.step();
       },
       [&](int64_t number) {
         const at::Tensor output = made.net->forward(batch(number));
         return shows_losses ? made.loss(output, batch(number + 40)) : output;
       }});
  return seen(made);
}

at::Tensor forward(const Row& row, auto& net, const at::Tensor& input) {
  const auto around = row.around();
  return net->forward(input);
}

// The program that trains `net`, which is called, on this rank's part of each batch; `stepped`
// steps what is not trained by the optimizer alone.
Program training(const Row& row, Made& made, auto& net, torch::optim::Optimizer& optimizer,
                 RankOf where, auto no_sync, std::function<void()> stepped = nullptr) {
  Program program;
  program.step = [&, where, no_sync, stepped](int64_t step) {
    optimizer.zero_grad();
    backward(row, step, no_sync, [&](int64_t number) {
      const at::Tensor input = part(batch(number), where);
      const at::Tensor target = part(batch(number + 40), where);
      if constexpr (requires { net->loss(made.loss, target, input); }) {
        if (!made.of_loss.empty()) return net->loss(made.loss, target, input).backward();
      }
      const at::Tensor output = forward(row, net, input);
      meet(made);
      made.loss(output, target).backward();
    });
    end_clock(made);
    if (stepped) return stepped();
    trireme::step(optimizer);
  };
  program.evaluate = [&](int64_t number) { return net->forward(batch(number)); };
  return program;
}

Values ddp(ThreadRank& rank, const Row& row, const DdpOptions& options = {}) {
  Made made = row.make({&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator, options);
  SGD optimizer = sgd(own_of(made));
  run(row, made, training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); }),
      &rank);
  return seen(made);
}

std::shared_ptr<void> writing_of(auto& written) {
  return std::shared_ptr<void>(new auto(written.writing()), [](auto* guard) { delete guard; });
}

ZeroParameters zero_parameters_of(const Made& made) {
  return made.foreign.empty() ? ZeroParameters(made.net) : ZeroParameters(own_of(made));
}

Values zero_1(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  ZeroRedundancyOptimizer<SGD> optimizer(zero_parameters_of(made), SGDOptions(kRate),
                                         rank.communicator, ZeroOptions{.stage = 1});
  Program program = training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); });
  program.writing = [&] { return writing_of(optimizer); };
  run(row, made, program, &rank);
  return seen(made);
}

Values zero_2(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  ZeroRedundancyOptimizer<SGD> optimizer(zero_parameters_of(made), SGDOptions(kRate),
                                         rank.communicator, ZeroOptions{.stage = 2});
  Program program =
      training(row, made, made.net, optimizer, rank.where, [&] { return optimizer.no_sync(); });
  program.writing = [&] { return writing_of(optimizer); };
  run(row, made, program, &rank);
  return seen(made);
}

Values sharded(ThreadRank& rank, const Row& row, const FsdpOptions& options) {
  Made made = row.make({&rank, 0.5});
  const bool gathers = options.communicator != rank.communicator;
  auto model = fully_shard(made.net, options);
  SGD optimizer = sgd(trained(model->parameters()));
  Program program =
      training(row, made, model, optimizer, rank.where, [&] { return model->no_sync(); });
  program.together = gathers;
  run(row, made, program, &rank);
  made.before();
  return seen(made, whole_values(*model, made.net->parameters()));
}

// Workers that average after each step, which under SGD is what DistributedDataParallel does.
Values in_rounds(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  SGD optimizer = sgd(own_of(made));
  LocalSGD rounds(*made.net, optimizer, {.sync_every = 1, .across = rank.communicator});
  run(row, made,
      training(row, made, made.net, optimizer, rank.where, kNothing, [&] { rounds.step(); }),
      &rank);
  return seen(made);
}

// Ranks that share no memory.
std::shared_ptr<Communicator> gloo_of(const ThreadRank& rank) {
  const std::chrono::seconds timeout(30);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("gathered", rank.store);
  return make_communicator(
      make_gloo_group(store, rank.where,
                      {.timeout = timeout, .connect_timeout = timeout, .hostname = "127.0.0.1"}),
      store);
}

Values replicated(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank});
  DataParallelOptions options;
  options.replicas = 2;
  DataParallel<Sequential> net(made.net, options);
  SGD optimizer = sgd(own_of(made));
  run(row, made, training(row, made, net, optimizer, {0, 1}, kNothing), &rank);
  return seen(made);
}

// A module that is called as a function is.
template <typename Function>
struct Called {
  Function forward;
  Called* operator->() { return this; }
};

Values checkpointed(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer = sgd(own_of(made));
  Called again{[&](const at::Tensor& input) {
    return checkpoint([&](const at::Tensor& x) { return net->forward(x); }, input);
  }};
  run(row, made, training(row, made, again, optimizer, rank.where, [&] { return net->no_sync(); }),
      &rank);
  return seen(made);
}

// Trains by steps of a pipeline, of which a rank may have some layers only: others stay as they
// are.
Values stepped(ThreadRank& rank, const Row& row, Made& made, auto& pipe, const Evaluate& evaluate) {
  Values own = trained(pipe->parameters(), made.foreign);
  own.insert(own.end(), made.of_loss.begin(), made.of_loss.end());
  SGD optimizer = sgd(own);
  Program program;
  program.step = [&](int64_t step) {
    optimizer.zero_grad();
    backward(
        row, step, [&] { return pipe->no_sync(); },
        [&](int64_t number) {
          const auto around = row.around();
          pipe->step(batch(number), batch(number + 40), PipelineLoss(made.loss));
        });
    end_clock(made);
    optimizer.step();
  };
  program.evaluate = evaluate;
  program.together = rank.where.world > 1;
  run(row, made, program, &rank);
  return seen(made);
}

Values piped(ThreadRank& rank, const Row& row, PipelineOptions options) {
  options.chunks = kChunks;
  options.schedule = "1f1b";
  const auto meets = options.ranks ? ThreadGroup(1).communicator(0) : nullptr;
  Made made = row.make({&rank, 1, row.is_whole ? nullptr : meets});
  Pipeline<> pipe(made.net, rank.communicator, options);
  return stepped(rank, row, made, pipe,
                 [&](int64_t number) { return pipe->eval_step(batch(number)); });
}

// Each rank has made its own stage, the half of the layers.
Values staged(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 1, row.is_whole ? nullptr : ThreadGroup(1).communicator(0)});
  const auto [number, world] = rank.where;
  const int64_t half = static_cast<int64_t>(made.net->size()) / world;
  Sequential own;
  for (int64_t layer = number * half; layer < (number + 1) * half; ++layer)
    own->push_back(std::to_string(layer), *(made.net->begin() + layer));
  StagePipeline pipe({PipelineStage(own, {.stage = number, .stages = world})}, rank.communicator,
                     PipelineOptions{.chunks = kChunks, .schedule = "1f1b"});
  return stepped(rank, row, made, pipe, [&](int64_t at) {
    const Values outputs = pipe->eval_step(batch(at));
    return outputs.empty() ? at::Tensor() : outputs.front();
  });
}

// A run on both ranks, which goes to replicas of the whole model behind the first step, and back.
// It shows losses in place of outputs.
Values elastic(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 1, ThreadGroup(1).communicator(0)});
  SGD optimizer = sgd(own_of(made));
  const auto layers = static_cast<int64_t>(made.net->size());
  PipeTransformerOptions options{.global_batch = kBatch, .chunks = kChunks};
  options.freeze = std::nullopt;
  options.costs.assign(made.net->size(), 1.0);
  PipeTransformer<> run_of(made.net, rank.communicator, PipelineLoss(made.loss), optimizer,
                           options);
  Program program;
  program.step = [&](int64_t step) {
    {
      const auto around = row.around();
      run_of->step(batch(step), batch(step + 40));
    }
    end_clock(made);
    if (step > 0) return;
    const ElasticPlan before = run_of->plan();
    run_of->transform({.ranks_per_pipeline = 1, .replicas = 2, .balance = {layers}});
    run_of->transform(before);
  };
  program.evaluate = [&](int64_t number) {
    return run_of->eval_step(batch(number), batch(number + 40));
  };
  program.together = true;
  run(row, made, program, &rank);
  made.before();
  Values found = made.elsewhere();
  for (const at::Tensor& parameter : made.net->parameters())
    found.push_back(has_memory(parameter) ? values_of({parameter}).front() : at::Tensor());
  found.insert(found.end(), made.outputs.begin(), made.outputs.end());
  return found;
}

Values working(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  ps::ParameterServer server(rank.communicator,
                             {ps::dense("model", made.net, ps::SGD{.lr = kRate})});
  Program program;
  server.dense("model").pull();
  program.step = [&](int64_t step) {
    made.net->zero_grad();
    backward(row, step, kNothing, [&](int64_t number) {
      const at::Tensor output = forward(row, made.net, part(batch(number), rank.where));
      meet(made);
      made.loss(output, part(batch(number + 40), rank.where)).backward();
    });
    rank.communicator->barrier("backward").wait();  // who refuses the push leaves
    end_clock(made);
    server.dense("model").push();
    server.clock();
    server.dense("model").pull();
  };
  program.evaluate = [&](int64_t number) { return made.net->forward(batch(number)); };
  program.writing = [&] { return writing_of(server.dense("model")); };
  run(row, made, program, &rank);
  server.dense("model").pull();  // what was moved, too
  return seen(made);
}

// Saves behind the second step, and loads into a model of zeros.
Values saved(ThreadRank& rank, const Row& row, const std::string& folder) {
  Made made = row.make({&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer = sgd(own_of(made));
  Program program = training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); });
  const auto step_before = program.step;
  program.step = [&, step_before](int64_t step) {
    step_before(step);
    if (step != 1) return;
    made.before();
    save_checkpoint(
        folder, *made.net,
        {.optimizer = &optimizer, .communicator = rank.communicator, .asynchronous = true})
        .wait();
    const auto writing = made.writing();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : made.net->parameters()) parameter.zero_();
    }
    load_checkpoint(folder, *made.net,
                    {.optimizer = &optimizer, .communicator = rank.communicator});
  };
  run(row, made, program, &rank);
  return seen(made);
}

// The second rank has one batch less, and then leaves its server.
Values joined(ThreadRank& rank, const Row& row) {
  Made made = row.make({&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer = sgd(own_of(made));
  Program program = training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); });
  program.steps = kSteps - rank.where.rank;
  program.step = [&](int64_t step) {
    optimizer.zero_grad();
    const bool alone = step == kSteps - 1;
    backward(
        row, step, [&] { return net->no_sync(); },
        [&](int64_t number) {
          const at::Tensor output = forward(row, net, part(batch(number), rank.where));
          if (!alone) meet(made);
          made.loss(output, part(batch(number + 40), rank.where)).backward();
        });
    end_clock(made, !alone);
    optimizer.step();
  };
  program.together = true;
  const bool leaves = made.leave && rank.where.rank > 0;
  net->join([&] {
    run(row, made, program, &rank);
    if (leaves) made.leave();
  });
  if (!leaves) return seen(made);
  Values found = values_of(made.net->parameters());                     // evaluates nothing
  if (made.foreign.empty()) found.insert(found.begin(), at::Tensor());  // stands for the rows
  return found;
}

std::shared_ptr<torch::nn::SequentialImpl> owned;

std::exception_ptr refused_there;  // by the owner

// The first rank calls the model of the second one.
Values owned_elsewhere(ThreadRank& rank, const Row& row) {
  const bool calls = rank.where.rank == 0;
  Made made = row.make({&rank, 1, ThreadGroup(1).communicator(0)});
  SGD of_loss = sgd(made.of_loss);
  if (!calls) owned = made.net.ptr();
  refused_there = nullptr;
  const auto all_meet = [&] { rank.communicator->barrier("step").wait(); };
  all_meet();
  std::optional<remote::RemoteModule> net;
  if (calls) {
    try {
      net = endpoints[0]->module(name_of(1), "model_of_pairs", {.optimizer = SgdSpec{kRate, 0, 0}});
    } catch (...) {
      refused_there = std::current_exception();
    }
  }
  all_meet();  // the owner need not hear that it refuses
  if (refused_there) std::rethrow_exception(refused_there);
  Program program;
  program.step = [&](int64_t step) {
    all_meet();
    if (calls) {
      net->zero_grad();
      of_loss.zero_grad();
      backward(row, step, kNothing, [&](int64_t number) {
        made.loss(forward(row, net, batch(number)), batch(number + 40)).backward();
      });
    }
    all_meet();
    end_clock(made);
    if (calls) {
      net->step();
      of_loss.step();
    }
    all_meet();
  };
  program.evaluate = [&](int64_t number) {
    return calls ? net->forward(batch(number)) : at::Tensor();
  };
  run(row, made, program, &rank);
  all_meet();
  if (!calls) {
    Values found = seen(made);
    std::fill_n(found.end() - static_cast<int64_t>(made.outputs.size() + made.of_loss.size()),
                made.of_loss.size(), at::Tensor());  // the caller trains it
    return found;
  }
  Values parameters;
  for (const auto& [name, value] : net->state()) parameters.push_back(value);
  parameters.resize(made.net->parameters().size());  // buffers are behind them
  return seen(made, parameters);
}

struct Column {
  std::string name;
  int64_t world;
  std::function<Values(ThreadRank&, const Row&)> train;
  Cut cut = {};
  bool is_cut = false;      // whether a rank has some layers only
  bool takes_loss = false;  // whether it is given the loss, or its program calls it
  bool calls = false;       // other ranks
  bool shows_losses = false;
};

std::string folder;  // the cell that is filled saves there

// All goes the way of codes, as fp32, so that it is as exact as without.
const Compression kCodes = Int8{.dense_below = int64_t{1} << 40, .between = Between::kRanks};

const std::vector<Column> kColumns{
    {"DDP", 2, [](auto& rank, auto& row) { return ddp(rank, row); }},
    {"ZeRO 1", 2, zero_1},
    {"ZeRO 2", 2, zero_2},
    {"fully_shard", 2,
     [](auto& rank, auto& row) { return sharded(rank, row, {.communicator = rank.communicator}); }},
    {"fully_shard, gathered", 2,
     [](auto& rank, auto& row) { return sharded(rank, row, {.communicator = gloo_of(rank)}); }},
    {"DDP, compressed", 2,
     [](auto& rank, auto& row) { return ddp(rank, row, {.compression = kCodes}); }},
    {"fully_shard, compressed", 2,
     [](auto& rank, auto& row) {
       return sharded(rank, row, {.communicator = rank.communicator, .compression = kCodes});
     }},
    {"LocalSGD", 2, in_rounds},
    {"DataParallel", 1, replicated, {}, false, true},
    {"checkpoint", 2, checkpointed},
    {"Pipeline, ranks",
     2,
     [](auto& rank, auto& row) { return piped(rank, row, {}); },
     {kChunks, false},
     true,
     true},
    {"Pipeline, threads",
     1,
     [](auto& rank, auto& row) { return piped(rank, row, {.ranks = false, .threads = 2}); },
     {kChunks, false},
     false,
     true},
    {"StagePipeline", 2, staged, {kChunks, false}, true, true},
    {"PipeTransformer", 2, elastic, {kChunks, false}, true, false, false, true},
    {"remote owner", 2, owned_elsewhere, {1}, false, true, true},
    {"worker", 2, working},
    {"save_checkpoint", 2, [](auto& rank, auto& row) { return saved(rank, row, folder); }},
    {"Join", 2, joined, {2, true, true}}};

// What is refused, and with which text.
const std::map<std::pair<std::string, std::string>, std::string> kRefused{
    {{"a first layer in place", "checkpoint"}, "modified by an inplace operation"},
    {{"SyncBatchNorm", "DataParallel"}, "[data_parallel] got SyncBatchNormImpl at '0'"},
    {{"SyncBatchNorm", "Pipeline, ranks"}, "[pipeline] got SyncBatchNormImpl at '0' over ranks"},
    {{"SyncBatchNorm", "StagePipeline"}, "[pipeline] got SyncBatchNormImpl at '0' over ranks"},
    {{"SyncBatchNorm", "Join"}, "[ddp] got SyncBatchNormImpl at '0' under join()"},
    {{"DistributedDataParallel inside", "ZeRO 2"},
     "[zero] got stage 2 for the module at '0.inner', which DistributedDataParallel averages"},
    {{"DistributedDataParallel inside", "fully_shard"},
     "[fully_shard] got a DistributedDataParallel at '0.inner', which averages gradients, too"},
    {{"DistributedDataParallel inside", "fully_shard, gathered"},
     "[fully_shard] got a DistributedDataParallel at '0.inner', which averages gradients, too"},
    {{"DistributedDataParallel inside", "DataParallel"},
     "[data_parallel] got a module that cannot be cloned"},
    {{"DistributedDataParallel inside", "Pipeline, threads"},
     "[pipeline] got a step of a pipeline in one process whose gradients DistributedDataParallel"},
    {{"DistributedDataParallel inside", "fully_shard, compressed"},
     "[fully_shard] got a DistributedDataParallel at '0.inner', which averages gradients, too"},
    {{"SyncBatchNorm", "PipeTransformer"}, "[pipetransformer] got SyncBatchNormImpl at '0'"},
    {{"DistributedDataParallel inside", "PipeTransformer"},
     "[pipetransformer] got a DistributedDataParallel at '0.inner'"},
    {{"a dense table", "PipeTransformer"},
     "[pipetransformer] got '0.weight', which a parameter server keeps"},
    {{"moved parameters", "PipeTransformer"}, "[pipetransformer] got an access to layer"},
    {{"moved parameters", "fully_shard, compressed"},
     "[fully_shard] the module's own '0.weight', which all ranks read, was written or replaced"},
    {{"moved parameters", "fully_shard"},
     "[fully_shard] the module's own '0.weight', which all ranks read, was written or replaced"},
    {{"moved parameters", "fully_shard, gathered"},
     "[fully_shard] got an access to parameters while they are not gathered"},
    {{"a dense table", "fully_shard"},
     "[ps] pull: parameter 'weight' of table 'layer' lies in other memory"},
    {{"a dense table", "fully_shard, gathered"},
     "[ps] pull: parameter 'weight' of table 'layer' lies in other memory"},
    {{"a dense table", "fully_shard, compressed"},
     "[ps] pull: parameter 'weight' of table 'layer' lies in other memory"},
    {{"sparse gradients", "DDP, compressed"},
     "[compression] got sparse gradients of '0.rows.weight'"},
    {{"sparse gradients", "fully_shard, compressed"},
     "[compression] got sparse gradients of '0.rows.weight'"},
    {{"a dense table", "LocalSGD"}, "[local_sgd] got '0.weight', which a parameter server keeps"},
    {{"a dense table", "remote owner"},
     "[remote] got '0.weight' of a table of a server in a module of a factory"},
    {{"a dense table", "worker"},
     "[ps] got '0.weight' for table 'model', which table 'layer' keeps"},
    {{"complex parameters", "worker"}, "[ps] got table 'model' with '0.phase' of dtype"},
    {{"sparse gradients", "worker"},
     "[ps] push: got a gradient of layout Sparse for '0.rows.weight'"}};

// Pairs that mean nothing: steps that another rank asks for have no inputs that could run out, a
// step of a run has its whole batch, and a strategy that takes no loss has it in the module that it
// wraps, as a layer among others.
bool has_meaning(const std::string& row, const Column& column) {
  if (row == "a remote function") return column.name != "Join";
  if (row == "no_sync" && column.name == "PipeTransformer") return false;
  return row != "a loss with parameters" || column.takes_loss;
}

// What a rank has trained, or what it raised.
struct Outcome {
  Values found;
  std::string text;
};

Outcome outcome(ThreadRank& rank, const Column& column, const Row& row) {
  std::optional<remote::Endpoint> endpoint;
  const auto own = static_cast<size_t>(rank.where.rank);
  while (served_by[own].answered.try_acquire()) continue;
  if (column.calls || row.calls)
    endpoints[own] = &endpoint.emplace(rank.communicator, name_of(rank.where.rank));
  Outcome found;
  try {
    found = {column.train(rank, row), ""};
  } catch (const std::exception& error) {
    found = {{}, error.what()};
  }
  if (endpoint) endpoint->stop();
  served_by[own].step = nullptr;
  served_by[own].evaluate = nullptr;
  return found;
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
  const double tolerance = kRows.at(row).tolerance;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto is_right = [&](const Outcome& one) {
      return one.found[i].defined() &&
             at::allclose(one.found[i], expected[i], tolerance, tolerance);
    };
    const auto is_wrong = [&](const Outcome& one) {
      return one.found[i].defined() && !is_right(one);
    };
    // A rank of a pipeline trains some layers, and the others are what they were.
    const bool right = std::any_of(outcomes.begin(), outcomes.end(), is_right) &&
                       (column.is_cut || std::none_of(outcomes.begin(), outcomes.end(), is_wrong));
    if (!right) return "tensor " + std::to_string(i) + " differs";
  }
  return "";
}

}  // namespace

TEST_CASE("what goes together is right, or refused by name") {
  define_for_calls();
  remote::define_module("model_of_pairs", [] { return Sequential(owned); });
  for (const auto& [name, row] : kRows) {
    for (const Column& column : kColumns) {
      if (!has_meaning(name, column)) continue;
      CAPTURE(column.name, name);
      CHECK(complaint(column, name, alone(row, column.cut, column.shows_losses)) == "");
    }
  }
}

}  // namespace trireme::pairs_test
