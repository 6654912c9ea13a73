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

// What was trained, the model's parameters and before them those of a server, and what was
// evaluated.
Values seen(const Made& made, const Values& parameters) {
  Values found;
  if (made.server) found.push_back(made.server->sparse("rows").pull(at::arange(kIds)));
  for (const at::Tensor& parameter : values_of(parameters)) found.push_back(parameter);
  found.insert(found.end(), made.outputs.begin(), made.outputs.end());
  return found;
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

void run(const Row& row, Made& made, const Program& program) {
  for (int64_t step = 0; step < kSteps; ++step) {
    const bool has_inputs = step < program.steps;
    if (has_inputs) row.run([&] { program.step(step); });
    const auto evaluate = [&](int64_t number) {
      if (!has_inputs) return at::Tensor();
      const at::NoGradGuard guard;
      const auto around = row.around();
      return program.evaluate(number);
    };
    for (at::Tensor& output : row.evaluate(evaluate, step + 20, program.together))
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

Values alone(const Row& row, Cut cut) {
  if (row.is_whole && cut.is_by_ranks && !cut.drops_last) cut.parts = 1;
  Made made = made_by(row.make, {});
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  int64_t parts = cut.parts;
  const auto of_batch = [&](int64_t number) {
    const auto inputs = batch(number).tensor_split(cut.parts);
    const auto targets = batch(number + 40).tensor_split(cut.parts);
    for (size_t at = 0; at < static_cast<size_t>(parts); ++at) {
      auto around = row.around();
      const at::Tensor output = made.net->forward(inputs[at].clone());
      const at::Tensor loss = loss_of(output, targets[at]) / static_cast<double>(cut.parts);
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
       [&](int64_t number) { return made.net->forward(batch(number)); }});
  return seen(made, made.net->parameters());
}

at::Tensor forward(const Row& row, auto& net, const at::Tensor& input) {
  const auto around = row.around();
  return net->forward(input);
}

// The program that trains `net`, which is called, on this rank's part of each batch.
Program training(const Row& row, Made& made, auto& net, torch::optim::Optimizer& optimizer,
                 RankOf where, auto no_sync) {
  Program program;
  program.step = [&, where, no_sync](int64_t step) {
    optimizer.zero_grad();
    backward(row, step, no_sync, [&](int64_t number) {
      const at::Tensor output = forward(row, net, part(batch(number), where));
      meet(made);
      loss_of(output, part(batch(number + 40), where)).backward();
    });
    end_clock(made);
    trireme::step(optimizer);
  };
  program.evaluate = [&](int64_t number) { return net->forward(batch(number)); };
  return program;
}

Values ddp(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  run(row, made, training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); }));
  return seen(made, made.net->parameters());
}

std::shared_ptr<void> writing_of(auto& written) {
  return std::shared_ptr<void>(new auto(written.writing()), [](auto* guard) { delete guard; });
}

Values zero_1(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  ZeroRedundancyOptimizer<SGD> optimizer(made.net, SGDOptions(kRate), rank.communicator,
                                         ZeroOptions{.stage = 1});
  Program program = training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); });
  program.writing = [&] { return writing_of(optimizer); };
  run(row, made, program);
  return seen(made, made.net->parameters());
}

Values zero_2(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  ZeroRedundancyOptimizer<SGD> optimizer(made.net, SGDOptions(kRate), rank.communicator,
                                         ZeroOptions{.stage = 2});
  Program program =
      training(row, made, made.net, optimizer, rank.where, [&] { return optimizer.no_sync(); });
  program.writing = [&] { return writing_of(optimizer); };
  run(row, made, program);
  return seen(made, made.net->parameters());
}

Values sharded(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  auto model = fully_shard(made.net, over(rank));
  SGD optimizer(trained(model->parameters()), SGDOptions(kRate));
  run(row, made,
      training(row, made, model, optimizer, rank.where, [&] { return model->no_sync(); }));
  return seen(made, whole_values(*model, made.net->parameters()));
}

Values replicated(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank});
  DataParallelOptions options;
  options.replicas = 2;
  DataParallel<Sequential> net(made.net, options);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  run(row, made, training(row, made, net, optimizer, {0, 1}, kNothing));
  return seen(made, made.net->parameters());
}

// A module that is called as a function is.
template <typename Function>
struct Called {
  Function forward;
  Called* operator->() { return this; }
};

Values checkpointed(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  Called again{[&](const at::Tensor& input) {
    return checkpoint([&](const at::Tensor& x) { return net->forward(x); }, input);
  }};
  run(row, made, training(row, made, again, optimizer, rank.where, [&] { return net->no_sync(); }));
  return seen(made, made.net->parameters());
}

Values piped(ThreadRank& rank, const Row& row, PipelineOptions options) {
  options.chunks = kChunks;
  options.schedule = "1f1b";
  const auto meets = options.ranks ? ThreadGroup(1).communicator(0) : nullptr;
  Made made = made_by(row.make, {&rank, 1, row.is_whole ? nullptr : meets});
  Pipeline<> pipe(made.net, rank.communicator, options);
  const Values own = trained(pipe->parameters());
  SGD optimizer(own.empty() ? Values{at::zeros({1}).requires_grad_()} : own, SGDOptions(kRate));
  Program program;
  program.step = [&](int64_t step) {
    optimizer.zero_grad();
    backward(
        row, step, [&] { return pipe->no_sync(); },
        [&](int64_t number) {
          const auto around = row.around();
          pipe->step(batch(number), batch(number + 40), loss_of);
        });
    end_clock(made);
    optimizer.step();
  };
  program.evaluate = [&](int64_t number) { return pipe->eval_step(batch(number)); };
  program.together = options.ranks;
  run(row, made, program);
  // Layers of other ranks stay as they are.
  return seen(made, made.net->parameters());
}

Values working(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  ps::ParameterServer server(rank.communicator,
                             {ps::dense("model", made.net, ps::SGD{.lr = kRate})});
  Program program;
  server.dense("model").pull();
  program.step = [&](int64_t step) {
    made.net->zero_grad();
    backward(row, step, kNothing, [&](int64_t number) {
      const at::Tensor output = forward(row, made.net, part(batch(number), rank.where));
      meet(made);
      loss_of(output, part(batch(number + 40), rank.where)).backward();
    });
    rank.communicator->barrier("backward").wait();  // who refuses the push leaves
    end_clock(made);
    server.dense("model").push();
    server.clock();
    server.dense("model").pull();
  };
  program.evaluate = [&](int64_t number) { return made.net->forward(batch(number)); };
  program.writing = [&] { return writing_of(server.dense("model")); };
  run(row, made, program);
  server.dense("model").pull();  // what was moved, too
  return seen(made, made.net->parameters());
}

// Saves behind the second step, and loads into a model of zeros.
Values saved(ThreadRank& rank, const Row& row, const std::string& folder) {
  Made made = made_by(row.make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
  Program program = training(row, made, net, optimizer, rank.where, [&] { return net->no_sync(); });
  const auto step_before = program.step;
  program.step = [&, step_before](int64_t step) {
    step_before(step);
    if (step != 1) return;
    save_checkpoint(folder, *made.net,
                    {.optimizer = &optimizer, .communicator = rank.communicator});
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : made.net->parameters()) parameter.zero_();
    }
    load_checkpoint(folder, *made.net,
                    {.optimizer = &optimizer, .communicator = rank.communicator});
  };
  run(row, made, program);
  return seen(made, made.net->parameters());
}

// The second rank has one batch less, and then leaves its server.
Values joined(ThreadRank& rank, const Row& row) {
  Made made = made_by(row.make, {&rank, 0.5});
  DistributedDataParallel<Sequential> net(made.net, rank.communicator);
  SGD optimizer(trained(made.net->parameters()), SGDOptions(kRate));
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
          loss_of(output, part(batch(number + 40), rank.where)).backward();
        });
    end_clock(made, !alone);
    optimizer.step();
  };
  program.together = true;
  net->join([&] {
    run(row, made, program);
    if (made.server && rank.where.rank > 0) made.server->leave();
  });
  if (!made.server || rank.where.rank == 0) return seen(made, made.net->parameters());
  Values found = values_of(made.net->parameters());  // evaluates nothing
  found.insert(found.begin(), at::Tensor());         // stands for the rows
  return found;
}

std::shared_ptr<torch::nn::SequentialImpl> owned;

// The first rank calls the model of the second one.
Values owned_elsewhere(ThreadRank& rank, const Row& row) {
  static const bool is_defined = [] {
    remote::define_module("model_of_pairs", [] { return Sequential(owned); });
    return true;
  }();
  TORCH_CHECK(is_defined);
  const bool calls = rank.where.rank == 0;
  Made made = made_by(row.make, {&rank, 1, ThreadGroup(1).communicator(0)});
  remote::Endpoint endpoint(rank.communicator, calls ? "caller" : "owner");
  if (!calls) owned = made.net.ptr();
  const auto all_meet = [&] { rank.communicator->barrier("step").wait(); };
  all_meet();
  std::optional<remote::RemoteModule> net;
  if (calls) net = endpoint.module("owner", "model_of_pairs", {.optimizer = SgdSpec{kRate, 0, 0}});
  Program program;
  program.step = [&](int64_t step) {
    all_meet();
    if (calls) {
      net->zero_grad();
      backward(row, step, kNothing, [&](int64_t number) {
        loss_of(forward(row, net, batch(number)), batch(number + 40)).backward();
      });
    }
    all_meet();
    end_clock(made);
    if (calls) net->step();
    all_meet();
  };
  program.evaluate = [&](int64_t number) {
    return calls ? net->forward(batch(number)) : at::Tensor();
  };
  run(row, made, program);
  all_meet();
  Values found = seen(made, made.net->parameters());
  if (calls) {
    const size_t rows = made.server ? 1 : 0;
    const auto state = net->state();
    for (size_t at = 0; at < made.net->parameters().size(); ++at)
      found[rows + at] = state[at].second;
  }
  net.reset();
  endpoint.stop();
  return found;
}

struct Column {
  std::string name;
  int64_t world;
  std::function<Values(ThreadRank&, const Row&)> train;
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
     [](auto& rank, auto& row) { return piped(rank, row, {}); },
     {kChunks, false},
     true},
    {"Pipeline, threads",
     1,
     [](auto& rank, auto& row) { return piped(rank, row, {.ranks = false, .threads = 2}); },
     {kChunks, false}},
    {"remote owner", 2, owned_elsewhere, {1}},
    {"worker", 2, working},
    {"save_checkpoint", 2, [](auto& rank, auto& row) { return saved(rank, row, folder); }},
    {"Join", 2, joined, {2, true, true}}};

// What is refused, and with which text.
const std::map<std::pair<std::string, std::string>, std::string> kRefused{
    {{"a first layer in place", "checkpoint"}, "modified by an inplace operation"},
    {{"SyncBatchNorm", "DataParallel"}, "[data_parallel] got SyncBatchNormImpl at '0'"},
    {{"SyncBatchNorm", "Pipeline, ranks"}, "[pipeline] got SyncBatchNormImpl at '0' over ranks"},
    {{"SyncBatchNorm", "Join"}, "[ddp] got SyncBatchNormImpl at '0' under join()"},
    {{"DistributedDataParallel inside", "ZeRO 2"},
     "[zero] got stage 2 for the module at '0.inner', which DistributedDataParallel averages"},
    {{"DistributedDataParallel inside", "fully_shard"},
     "[fully_shard] got a DistributedDataParallel at '0.inner', which averages gradients, too"},
    {{"DistributedDataParallel inside", "DataParallel"},
     "[data_parallel] got a module that cannot be cloned"},
    {{"DistributedDataParallel inside", "Pipeline, threads"},
     "[pipeline] got a step of a pipeline in one process whose gradients DistributedDataParallel"},
    {{"moved parameters", "fully_shard"},
     "[fully_shard] the module's own '0.weight', which all ranks read, was written or replaced"},
    {{"complex parameters", "worker"}, "[ps] got table 'model' with '0.phase' of dtype"},
    {{"sparse gradients", "worker"}, "[ps] push: got a gradient of layout Sparse for '0.rows'"}};

// What a rank has trained, or what it raised.
struct Outcome {
  Values found;
  std::string text;
};

Outcome outcome(ThreadRank& rank, const Column& column, const Row& row) {
  try {
    return {column.train(rank, row), ""};
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
  const double tolerance = kRows.at(row).tolerance;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto is_right = [&](const Outcome& one) {
      return !one.found[i].defined() ||
             at::allclose(one.found[i], expected[i], tolerance, tolerance);
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
  for (const auto& [name, row] : kRows) {
    for (const Column& column : kColumns) {
      CAPTURE(column.name, name);
      CHECK(complaint(column, name, alone(row, column.cut)) == "");
    }
  }
}

}  // namespace trireme::pairs_test
