// fully_shard for C++ modules: N ranks train as one process does on the whole batch.

#include <torch/serialize.h>

#include <atomic>
#include <catch_torch.h>
#include <mutex>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <thread>
#include <vector>

namespace trireme::fsdp_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

template <typename Optimizer, typename Options>
std::vector<Values> train_sharded(int64_t world, const Options& options, int64_t steps) {
  return on_shm_ranks<Values>(world, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    Optimizer optimizer(model->parameters(), options);
    for (int64_t step = 0; step < steps; ++step) fsdp_step(model, optimizer, step, rank.where);
    return whole_values(*model, net->parameters());
  });
}

using torch::nn::Linear;
using torch::nn::LinearOptions;

// Two layers, which are units if there is a communicator, and a rest.
torch::nn::Sequential blocks(const std::shared_ptr<Communicator>& communicator) {
  std::vector<Linear> layers;
  {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(5);
    layers = {Linear(6, 9), Linear(LinearOptions(9, 5).bias(false)), Linear(5, 2)};
  }
  torch::nn::Sequential net;
  const auto add = [&](const char* name, const Linear& layer) {
    if (communicator) {
      net->push_back(name, fully_shard(layer, {.communicator = communicator}));
    } else {
      net->push_back(name, layer);
    }
  };
  add("first", layers[0]);
  net->push_back("between", torch::nn::Tanh());
  net->push_back("norm", torch::nn::BatchNorm1d(9));
  add("second", layers[1]);
  net->push_back("last", layers[2]);
  return net;
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

// One matrix, there and back.
struct TiedNetImpl : torch::nn::Module {
  struct BackImpl : torch::nn::Module {
    explicit BackImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
    at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
    at::Tensor weight;
  };
  TiedNetImpl() {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(3);
    there = register_module("there", Linear(6, 6));
    back = register_module("back", std::make_shared<BackImpl>(there->weight));
  }
  at::Tensor forward(const at::Tensor& x, bool /*with_head*/ = true) {
    return back->forward(torch::tanh(there(x))).square().mean();
  }
  Linear there{nullptr};
  std::shared_ptr<BackImpl> back;
};
TORCH_MODULE(TiedNet);

// Returns what nobody can look into.
struct Wrapped {
  at::Tensor loss;
  at::Tensor backward() const { return loss.backward(), loss; }
};
struct WrappingNetImpl : UnevenNetImpl {
  Wrapped forward(const at::Tensor& x, bool with_head) {
    return {UnevenNetImpl::forward(x, with_head)};
  }
};
TORCH_MODULE(WrappingNet);

// Each tensor once, as torch's optimizers want them.
Values once_each(const torch::nn::Module& module) { return named_parameters(module).tensors; }

}  // namespace

TEST_CASE("training equals one process on the whole batch, at any number of ranks") {
  // Sums in another order go through Adam's square root: exact to rounding, not bitwise.
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 6);
  for (const int64_t world : {1, 2, 3}) {
    CAPTURE(world);
    for (const Values& found : train_sharded<AdamW>(world, options, 6))
      CHECK(count_unlike(found, expected) == 0);
  }
}

TEST_CASE("backward with create_graph trains as without, and leaves no graph") {
  const Values expected = train_alone<SGD>(SGDOptions(0.1), 4);
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      SGD optimizer(model->parameters(), SGDOptions(0.1));
      for (int64_t number = 0; number < 4; ++number) {
        optimizer.zero_grad();
        model->forward(part_of_batch(number, rank.where), number % 2 == 0)
            .backward({}, /*keep_graph=*/true, /*create_graph=*/true);
        for (const at::Tensor& parameter : model->parameters())
          TORCH_CHECK(!parameter.grad().defined() || !parameter.grad().requires_grad());
        trireme::step(optimizer);
      }
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("our optimizers pass the gate by themselves") {
  const AdamWOptions adamw(0.01);
  const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);
  const auto train = [](auto make_optimizer) {
    return on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      auto optimizer = make_optimizer(model->parameters());
      for (int64_t step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        model->forward(part_of_batch(step, rank.where), step % 2 == 0).backward();
        optimizer.step();
      }
      return whole_values(*model, net->parameters());
    });
  };
  for (const Values& found : train([&](auto all) { return optim::AdamW(all, adamw); }))
    CHECK(count_unlike(found, train_alone<AdamW>(adamw, 6)) == 0);
  for (const Values& found : train([&](auto all) { return optim::SGD(all, sgd); }))
    CHECK(count_unlike(found, train_alone<SGD>(sgd, 6)) == 0);
}

TEST_CASE("parameters are this rank's shards, under the names of the plain module") {
  UnevenNet plain;
  const auto seen = on_shm_ranks<std::vector<std::string>>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    const at::Tensor inner_weight = net->first->weight;
    const auto model = fully_shard(net, over(rank));
    const auto shards = model->named_parameters();
    std::vector<std::string> names = names_of(*model);
    names.push_back(std::to_string(shards["first.weight"].size(0)));
    names.push_back(std::to_string(shards["gain"].dim()));
    names.push_back(std::to_string(shards["frozen"].requires_grad()));
    names.push_back(std::to_string(inner_weight.is_same(net->first->weight)));
    names.push_back(std::to_string(inner_weight.size(0)));
    return names;
  });
  for (const size_t rank : {0, 1}) {
    std::vector<std::string> expected = names_of(*plain);
    for (const char* text : {rank == 0 ? "7" : "6", "0", "0", "1", "13"})
      expected.emplace_back(text);
    CHECK(seen[rank] == expected);
  }
}

TEST_CASE("units in a Sequential, which is a unit") {
  torch::nn::Sequential alone = blocks(nullptr);
  alone->eval();  // ranks have batch statistics of their own
  AdamW plain(alone->parameters(), AdamWOptions(0.02));
  for (int64_t step = 0; step < 5; ++step) {
    plain.zero_grad();
    alone->forward(whole_batch(step)).square().mean().backward();
    plain.step();
  }
  for (const int64_t world : {2, 3}) {
    const auto found = on_shm_ranks<Values>(world, [](ThreadRank& rank) {
      auto model = fully_shard(blocks(rank.communicator), over(rank));
      model->eval();
      AdamW optimizer(model->parameters(), AdamWOptions(0.02));
      for (int64_t step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        model->forward(part_of_batch(step, rank.where)).square().mean().backward();
        trireme::step(optimizer);
      }
      std::stringstream saved;
      torch::save(model, saved);
      torch::nn::Sequential whole = blocks(nullptr);
      torch::load(whole, saved);
      Values values = values_of(whole->parameters());
      values.push_back(at::full({}, names_of(*model) == names_of(*whole) ? 1.0 : 0.0));
      values.push_back(at::full({}, model->module()[2]->is_training() ? 1.0 : 0.0));
      return values;
    });
    for (const Values& values : found) {
      Values expected = values_of(alone->parameters());
      expected.push_back(at::ones({}));
      expected.push_back(at::zeros({}));
      CHECK(count_unlike(values, expected) == 0);
    }
  }
}

TEST_CASE("a parameter that hangs in two modules of a unit is one") {
  TiedNet alone;
  SGD plain(once_each(*alone), SGDOptions(0.2));
  for (int64_t step = 0; step < 4; ++step) {
    plain.zero_grad();
    alone->forward(whole_batch(step)).backward();
    plain.step();
  }
  const auto found = on_shm_ranks<Values>(2, [](ThreadRank& rank) {
    TiedNet net;
    auto model = fully_shard(net, over(rank));
    const auto shards = model->named_parameters();
    SGD optimizer(once_each(*model), SGDOptions(0.2));
    for (int64_t step = 0; step < 4; ++step) fsdp_step(model, optimizer, step, rank.where);
    Values values = whole_values(*model, net->parameters());
    values.push_back(
        at::full({}, shards["there.weight"].is_same(shards["back.weight"]) ? 1.0 : 0.0));
    return values;
  });
  Values expected = values_of(alone->parameters());
  expected.push_back(at::ones({}));
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("no_sync accumulates, and so do several forwards before a backward") {
  UnevenNet alone;
  AdamW plain(alone->parameters(), AdamWOptions(0.01));
  for (int64_t step = 0; step < 3; ++step) {
    plain.zero_grad();
    for (const int64_t batch : {0, 1, 2}) alone->forward(whole_batch(3 * step + batch)).backward();
    plain.step();
  }
  const Values expected = values_of(alone->parameters());
  for (const bool guards : {true, false}) {
    CAPTURE(guards);
    const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      const auto loss = [&](int64_t batch) {
        return model->forward(part_of_batch(batch, rank.where));
      };
      for (int64_t step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        if (guards) {
          const auto guard = model->no_sync();
          loss(3 * step).backward();
          loss(3 * step + 1).backward();
        } else {
          const at::Tensor first = loss(3 * step);
          const at::Tensor second = loss(3 * step + 1);
          first.backward();
          second.backward();
        }
        loss(3 * step + 2).backward();
        trireme::step(optimizer);
      }
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("no_sync of a unit holds back its gradients, not those of the others") {
  const auto loss = [](auto& net, int64_t step, RankOf where) {
    return net->forward(part_of_batch(step, where)).square().mean();
  };
  torch::nn::Sequential alone = blocks(nullptr);
  alone->eval();
  for (int64_t step = 0; step < 2; ++step) loss(alone, step, {0, 1}).backward();
  const auto expected = alone->named_parameters();
  std::vector<std::string> defined(2);
  const auto unlike = on_shm_ranks<int64_t>(2, [&](ThreadRank& rank) {
    auto model = fully_shard(blocks(rank.communicator), over(rank));
    model->eval();
    {
      const auto guard = dynamic_cast<ShardedModule&>(*model->module()[0]).no_sync();
      loss(model, 0, rank.where).backward();
    }
    const auto shards = model->named_parameters();
    for (const auto& item : shards)
      if (item.value().grad().defined())
        defined[static_cast<size_t>(rank.where.rank)] += item.key() + " ";
    loss(model, 1, rank.where).backward();
    int64_t count = 0;
    for (const auto& item : shards) {
      const at::Tensor whole = expected[item.key()].grad();
      count += !at::allclose(item.value().grad(), whole.chunk(2)[rank.where.rank], 1e-5, 1e-7);
    }
    return count;
  });
  CHECK(unlike == std::vector<int64_t>{0, 0});
  for (const std::string& names : defined)
    CHECK(names == "norm.weight norm.bias second.weight last.weight last.bias ");
}

TEST_CASE("clip_grad_norm_ of shards is that of one process") {
  UnevenNet alone;
  SGD plain(alone->parameters(), SGDOptions(0.1));
  std::vector<double> norms;
  for (int64_t step = 0; step < 3; ++step) {
    plain.zero_grad();
    alone->forward(whole_batch(step)).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05));
    plain.step();
  }
  std::vector<std::vector<double>> seen(3);
  const auto found = on_shm_ranks<Values>(3, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model->forward(part_of_batch(step, rank.where)).backward();
      seen[static_cast<size_t>(rank.where.rank)].push_back(
          model->clip_grad_norm_(0.05).item<double>());
      trireme::step(optimizer);
    }
    return whole_values(*model, net->parameters());
  });
  for (const size_t rank : {0, 1, 2}) {
    CHECK(count_unlike(found[rank], values_of(alone->parameters())) == 0);
    for (const size_t step : {0, 1, 2}) CHECK(seen[rank][step] == Approx(norms[step]));
  }
}

TEST_CASE("a closure, a scheduler, freezing in between") {
  const auto run = [](auto& model, const Values& parameters, const at::Tensor& bias, RankOf where) {
    AdamW optimizer(parameters, AdamWOptions(0.02));
    torch::optim::StepLR scheduler(optimizer, 2, 0.5);
    for (int64_t step = 0; step < 6; ++step) {
      if (step == 2 || step == 4) at::Tensor(bias).set_requires_grad(step == 4);
      trireme::step(optimizer, [&] {
        optimizer.zero_grad();
        at::Tensor loss = model->forward(part_of_batch(step, where));
        loss.backward();
        return loss;
      });
      scheduler.step();
    }
  };
  UnevenNet alone;
  run(alone, alone->parameters(), alone->first->bias, {0, 1});
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    run(model, model->parameters(), model->named_parameters()["first.bias"], rank.where);
    return whole_values(*model, net->parameters());
  });
  for (const Values& values : found)
    CHECK(count_unlike(values, values_of(alone->parameters())) == 0);
}

TEST_CASE("forwards and gradients in bf16, steps in fp32") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 6);
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, {.param_dtype = at::kBFloat16,
                                   .reduce_dtype = at::kFloat,
                                   .output_dtype = at::kFloat,
                                   .communicator = rank.communicator});
    AdamW optimizer(model->parameters(), options);
    for (int64_t step = 0; step < 6; ++step) fsdp_step(model, optimizer, step, rank.where);
    std::stringstream saved;
    torch::save(model, saved);
    UnevenNet plain;
    torch::load(plain, saved);
    Values values = values_of(plain->parameters());
    TORCH_CHECK(net->first->weight.scalar_type() == at::kBFloat16);
    TORCH_CHECK(model->parameters()[0].grad().scalar_type() == at::kFloat);
    TORCH_CHECK(model->forward(part_of_batch(0, rank.where)).scalar_type() == at::kFloat);
    return values;
  });
  for (const Values& values : found) CHECK(count_unlike(values, expected, 0.03) <= 1);
  CHECK(count_unlike(found[0], found[1], 0) == 0);
}

TEST_CASE("outputs in a type of the user's") {
  const SGDOptions options(0.1);
  const Values expected = train_alone<SGD>(options, 4);
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    WrappingNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), options);
    for (int64_t step = 0; step < 4; ++step) fsdp_step(model, optimizer, step, rank.where);
    return whole_values(*model, net->parameters());
  });
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("optional arguments, outputs in tuples, modules in shared pointers") {
  const auto dtypes = on_shm_ranks<std::vector<at::ScalarType>>(1, [](ThreadRank& rank) {
    const auto lstm = std::make_shared<torch::nn::LSTMImpl>(6, 4);
    const auto model = fully_shard(lstm, {.param_dtype = at::kBFloat16,
                                          .output_dtype = at::kDouble,
                                          .communicator = rank.communicator});
    const auto first = model.ptr()->forward(whole_batch(0).view({kRows, 1, 6}));
    const auto& [output, state] =
        model.ptr()->forward(whole_batch(1).view({kRows, 1, 6}), std::optional(std::get<1>(first)));
    return std::vector<at::ScalarType>{lstm->named_parameters()["weight_ih_l0"].scalar_type(),
                                       output.scalar_type(), std::get<1>(state).scalar_type(),
                                       model->parameters()[0].scalar_type()};
  });
  CHECK(dtypes[0] ==
        std::vector<at::ScalarType>{at::kBFloat16, at::kDouble, at::kDouble, at::kFloat});
}

TEST_CASE("threads evaluate while one of them trains, each with whole parameters") {
  const auto wrong = on_shm_ranks<int64_t>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    AdamW optimizer(model->parameters(), AdamWOptions(0.1));
    fsdp_step(model, optimizer, 0, rank.where);
    const auto outputs = [&](int64_t number) {
      const at::NoGradGuard no_grad;
      return model->forward(part_of_batch(number, rank.where));
    };
    const at::Tensor expected = outputs(1);
    std::atomic<int64_t> differ = 0;
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 3; ++caller)
      threads.emplace_back([&] {
        for (int call = 0; call < 30; ++call) differ += !outputs(1).equal(expected);
      });
    for (int64_t step = 2; step < 5; ++step)
      model->forward(part_of_batch(step, rank.where)).backward();
    for (std::thread& thread : threads) thread.join();
    return differ.load();
  });
  CHECK(wrong == std::vector<int64_t>(2, 0));
}

}  // namespace trireme::fsdp_test
