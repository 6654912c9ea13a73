// fully_shard for C++ modules whose ranks gather parameters, over Gloo: they train as one process
// does on the whole batch.

#include <trireme/comm/subgroups.h>

#include <torch/serialize.h>

#include <catch_torch.h>
#include <mutex>
#include <recording_communicator.h>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <vector>

namespace trireme::fsdp_gathered_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

template <typename Result>
std::vector<Result> on_gloo_ranks(int64_t world, const std::function<Result(ThreadRank&)>& main) {
  return on_ranks<Result>(world, Engine::kGloo, main);
}

// Three layers, units if there is a communicator, of which `skips` leaves out the second one.
struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(const std::shared_ptr<Communicator>& communicator) {
    std::vector<Linear> layers;
    {
      const std::lock_guard<std::mutex> lock(zero_seed_mutex);
      torch::manual_seed(5);
      layers = {Linear(6, 9), Linear(9, 9), Linear(9, 2)};
    }
    for (size_t i = 0; i < layers.size(); ++i) {
      const std::string name = "layer" + std::to_string(i);
      if (communicator) {
        units.push_back(fully_shard(layers[i], {.communicator = communicator}));
        register_module(name, units.back());
      } else {
        plain.push_back(register_module(name, layers[i]));
      }
    }
  }
  at::Tensor layer(size_t i, const at::Tensor& x) {
    return plain.empty() ? units[i]->forward(x) : plain[i](x);
  }
  at::Tensor forward(const at::Tensor& x, bool skips = false) {
    at::Tensor hidden = torch::tanh(layer(0, x));
    TORCH_CHECK(!fails, "spilled the coffee");
    if (skips && stumbles) TORCH_CHECK(error_of([&] { layer(1, x); }) != "no error");
    for (int64_t i = 0; i < times && !skips; ++i) hidden = hidden + torch::tanh(layer(1, hidden));
    return layer(2, hidden).square().mean();
  }
  std::vector<Sharded<Linear>> units;
  std::vector<Linear> plain;
  bool fails = false;
  bool stumbles = false;  // over what it skips
  int64_t times = 1;      // that the second layer is used
};
TORCH_MODULE(Layers);
const std::shared_ptr<Communicator> kAlone;

// A unit whose outputs nobody finds, in a net around it.
struct Hidden {
  at::Tensor tensor;
};
struct HidingImpl : torch::nn::Module {
  HidingImpl() {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(3);
    first = register_module("first", Linear(6, 5));
    second = register_module("second", Linear(5, 4));  // read in backward
  }
  Hidden forward(const at::Tensor& x) { return {second(torch::tanh(first(x)))}; }
  Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Hiding);
template <typename Inner>
struct HidingNetImpl : torch::nn::Module {
  explicit HidingNetImpl(Inner hidden) : inner(register_module("inner", std::move(hidden))) {
    gain = register_parameter("gain", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return (inner->forward(x).tensor * gain).square().mean();
  }
  Inner inner;
  at::Tensor gain;
};
template <typename Inner>
struct HidingNet : torch::nn::ModuleHolder<HidingNetImpl<Inner>> {
  using torch::nn::ModuleHolder<HidingNetImpl<Inner>>::ModuleHolder;
};

// Over some steps in which rank r skips the second layer in every step of which `skips` says so.
using Skips = std::function<bool(int64_t step, int64_t rank)>;
Values train_layers_alone(int64_t steps, int64_t world, const Skips& skips) {
  Layers net(kAlone);
  AdamW optimizer(net->parameters(), AdamWOptions(0.02));
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < world; ++rank) {
      const at::Tensor loss = net->forward(part_of_batch(step, {rank, world}), skips(step, rank));
      (loss / static_cast<double>(world)).backward();
    }
    optimizer.step();
  }
  return values_of(net->parameters());
}

template <typename Model>
Values saved_values(Model& model) {
  std::stringstream saved;
  torch::save(model, saved);
  Layers whole(kAlone);
  torch::load(whole, saved);
  return values_of(whole->parameters());
}

}  // namespace

TEST_CASE("gathering ranks train as one process does, at any number of them") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 5);
  for (const int64_t world : {1, 2, 3}) {
    CAPTURE(world);
    const auto found = on_gloo_ranks<Values>(world, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 5; ++step) fsdp_step(model, optimizer, step, rank.where);
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("units in a unit, some of which ranks skip; memory goes after each; saved whole") {
  const Skips skips = [](int64_t step, int64_t rank) { return (step + rank) % 2 == 1; };
  std::vector<std::string> had(2);
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    Layers net(rank.communicator);
    auto model = fully_shard(net, over(rank));
    AdamW optimizer(model->parameters(), AdamWOptions(0.02));
    std::string& said = had[static_cast<size_t>(rank.where.rank)];
    for (int64_t step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss =
          model->forward(part_of_batch(step, rank.where), skips(step, rank.where.rank));
      said += has_memory(net->units[0]->module()) ? "memory after forward " : "";
      loss.backward();
      said += has_memory(net->units[0]->module()) ? "memory after backward " : "";
      trireme::step(optimizer);
    }
    model->unshard();
    said += has_memory(net->units[0]->module()) ? "" : "no memory after unshard ";
    model->reshard();
    said += has_memory(net->units[0]->module()) ? "memory after reshard " : "";
    return saved_values(model);
  });
  const Values expected = train_layers_alone(5, 2, skips);
  for (const size_t rank : {0, 1}) {
    CHECK(count_unlike(found[rank], expected) == 0);
    CHECK(had[rank] == "");
  }
}

TEST_CASE("a layer that all ranks leave out at first, use later, and then more than once") {
  const auto train = [](Layers& net, const auto& loss_of, torch::optim::Optimizer& optimizer) {
    for (const int64_t times : {0, 1, 3, 2, 0, 1, 1, 2}) {
      net->times = times;
      optimizer.zero_grad();
      loss_of(times);
      trireme::step(optimizer);
    }
  };
  Layers alone(kAlone);
  AdamW plain(alone->parameters(), AdamWOptions(0.02));
  const auto whole_loss = [&](int64_t batch) {
    for (int64_t rank = 0; rank < 2; ++rank)
      (alone->forward(part_of_batch(batch, {rank, 2})) / 2).backward();
  };
  train(alone, whole_loss, plain);
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    Layers net(rank.communicator);
    auto model = fully_shard(net, over(rank));
    AdamW optimizer(model->parameters(), AdamWOptions(0.02));
    const auto loss = [&](int64_t batch) {
      model->forward(part_of_batch(batch, rank.where)).backward();
      for (auto& unit : net->units) TORCH_CHECK(!has_memory(unit->module()));
    };
    train(net, loss, optimizer);
    return saved_values(model);
  });
  for (const Values& values : found)
    CHECK(count_unlike(values, values_of(alone->parameters())) == 0);
}

TEST_CASE("a step in the known order sends its gathers, its gradients and one small sum") {
  std::vector<std::string> wires(2);
  on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    const auto wire = std::make_shared<RecordingCommunicator>(rank.communicator);
    Layers net(wire);
    auto model = fully_shard(net, {.communicator = wire});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      wire->clear();
      fsdp_step(model, optimizer, 2 * step + 1, rank.where);
    }
    for (const WireRecord& record : wire->records())
      wires[static_cast<size_t>(rank.where.rank)] +=
          record.verb + " " + std::to_string(record.bytes) + ", ";
    return Values();
  });
  for (const std::string& wire : wires)
    CHECK(wire ==
          "all_gather 140, all_gather 200, all_gather 40, all_gather 40, all_gather 200, "
          "all_gather 140, reduce_scatter 760, all_reduce 28, ");
}

TEST_CASE("a unit that throws, and is caught around it, is one that is skipped") {
  const Skips skips = [](int64_t step, int64_t rank) { return step == 0 || step == 1 + rank; };
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    Layers net(rank.communicator);
    auto model = fully_shard(net, over(rank));
    net->stumbles = true;
    AdamW optimizer(model->parameters(), AdamWOptions(0.02));
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model->forward(part_of_batch(step, rank.where), skips(step, rank.where.rank)).backward();
      trireme::step(optimizer);
    }
    return saved_values(model);
  });
  const Values expected = train_layers_alone(4, 2, skips);
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("outputs in a type of the user's: the unit stays until backward is over") {
  static_assert(kFindsAllTensors<std::pair<at::Tensor, std::vector<at::Tensor>>>);
  static_assert(kFindsAllTensors<std::tuple<at::Tensor, double>>);
  static_assert(!kFindsAllTensors<std::pair<at::Tensor, Hidden>>);
  const auto train = [](auto& model, RankOf where, const std::function<void()>& after_forward) {
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = model->forward(part_of_batch(step, where));
      after_forward();
      loss.backward();
      trireme::step(optimizer);
    }
  };
  HidingNet<Hiding> alone{Hiding()};
  train(alone, {0, 1}, [] {});
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    HidingNet<Sharded<Hiding>> net{fully_shard(Hiding(), over(rank))};
    auto model = fully_shard(net.ptr(), over(rank));
    train(model, rank.where, [&] { TORCH_CHECK(has_memory(net->inner->module())); });
    TORCH_CHECK(!has_memory(net->inner->module()));
    model->unshard();
    return values_of(net->inner->module().parameters());
  });
  const Values expected = values_of(alone->inner->parameters());
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("a gathering model loads what a plain one has saved") {
  const Layers plain(kAlone);
  for (const at::Tensor& parameter : plain->parameters()) at::Tensor(parameter.detach()).mul_(3);
  std::stringstream saved;
  torch::save(plain, saved);
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    Layers net(rank.communicator);
    auto model = fully_shard(net, over(rank));
    model->forward(part_of_batch(0, rank.where));
    std::stringstream own(saved.str());
    torch::load(model, own);
    return saved_values(model);
  });
  for (const Values& values : found)
    CHECK(count_unlike(values, values_of(plain->parameters()), 0) == 0);
}

TEST_CASE("gathering ranks accumulate under no_sync, and clip by one norm") {
  UnevenNet alone;
  SGD plain(alone->parameters(), SGDOptions(0.1));
  std::vector<double> norms;
  for (int64_t step = 0; step < 2; ++step) {
    plain.zero_grad();
    for (const int64_t batch : {0, 1}) alone->forward(whole_batch(2 * step + batch)).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05));
    plain.step();
  }
  std::vector<std::vector<double>> seen(2);
  const auto found = on_gloo_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int64_t step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      {
        const auto guard = model->no_sync();
        model->forward(part_of_batch(2 * step, rank.where)).backward();
      }
      model->forward(part_of_batch(2 * step + 1, rank.where)).backward();
      seen[static_cast<size_t>(rank.where.rank)].push_back(
          model->clip_grad_norm_(0.05).item<double>());
      trireme::step(optimizer);
    }
    return whole_values(*model, net->parameters());
  });
  for (const size_t rank : {0, 1}) {
    CHECK(count_unlike(found[rank], values_of(alone->parameters())) == 0);
    for (const size_t step : {0, 1}) CHECK(seen[rank][step] == Approx(norms[step]));
  }
}

TEST_CASE("resharded among two of four ranks a unit is gathered from these in backward") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 3);
  std::vector<std::string> wires(4);
  const auto found = on_gloo_ranks<Values>(4, [&](ThreadRank& rank) {
    const auto wire =
        std::make_shared<RecordingCommunicator>(split_contiguous(*rank.communicator, 2));
    UnevenNet net;
    auto model = fully_shard(
        net, {.communicator = rank.communicator, .reshard_among = 2, .reshards_with = wire});
    AdamW optimizer(model->parameters(), options);
    for (int64_t step = 0; step < 3; ++step) fsdp_step(model, optimizer, step, rank.where);
    std::string& text = wires[static_cast<size_t>(rank.where.rank)];
    for (const WireRecord& record : wire->records()) text += record.verb + " ";
    return whole_values(*model, net->parameters());
  });
  for (const size_t rank : {0, 1, 2, 3}) {
    CHECK(count_unlike(found[rank], expected) == 0);
    CHECK(wires[rank] == "all_gather all_gather all_gather ");
  }
}

TEST_CASE("ways to reshard that contradict each other, or the number of ranks") {
  std::vector<std::string> said(4);
  run_thread_ranks(4, [&](ThreadRank& rank) {
    const auto refused = [&](FsdpOptions options) {
      options.communicator = rank.communicator;
      return error_of<c10::ValueError>([&] { fully_shard(Linear(4, 4), std::move(options)); });
    };
    std::string& text = said[static_cast<size_t>(rank.where.rank)];
    text = refused({.reshard_among = 3});
    text += refused({.reshard_after_forward = true, .reshard_among = 2});
    text += refused({.reshards_with = rank.communicator});
  });
  for (const std::string& text : said) {
    CHECK_THAT(text, Catch::Contains("[fully_shard] got reshard_among=3"));
    const std::string contradict = "got options of resharding that contradict each other";
    const size_t first = text.find(contradict);
    CHECK(text.find(contradict, first + 1) != std::string::npos);
  }
}

TEST_CASE("a forward that throws on one rank ends that of the other, which is told why") {
  std::vector<std::string> said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    Layers net(rank.communicator);
    auto model = fully_shard(net, over(rank));
    model->forward(part_of_batch(0, rank.where)).backward();
    net->fails = rank.where.rank == 1;
    std::string& text = said[static_cast<size_t>(rank.where.rank)];
    text = error_of([&] { model->forward(part_of_batch(1, rank.where)).backward(); });
  });
  CHECK_THAT(said[1], Catch::Contains("spilled the coffee"));
  CHECK_THAT(said[0], Catch::Contains("a forward was abandoned: spilled the coffee"));
}

}  // namespace trireme::fsdp_gathered_test
