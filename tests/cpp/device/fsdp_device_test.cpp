// fully_shard on a device with streams and an engine of its own: what it does there equals, in
// every option, what it does on the CPU over Gloo.

#include <trireme/saving/module_checkpoint.h>

#include <torch/serialize.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <device/sim_stream.h>
#include <mutex>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::fsdp_device_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

// Units in a unit that has parameters of its own.
struct DeepNetImpl : torch::nn::Module {
  DeepNetImpl(const FsdpOptions& options, c10::Device device) {
    {
      const std::lock_guard<std::mutex> lock(zero_seed_mutex);
      torch::manual_seed(5);
      layers = {Linear(6, 9), Linear(9, 9), Linear(9, 9), Linear(9, 2)};
    }
    for (size_t i = 0; i < layers.size(); ++i) {
      if (!device.is_cpu()) move_to(*layers[i], device);
      units.push_back(
          register_module("layer" + std::to_string(i), fully_shard(layers[i], options)));
    }
    gain = register_parameter("gain", at::ones({9}, device));
    scale = register_parameter("scale", at::ones({}, device));
  }
  at::Tensor forward(const at::Tensor& x, bool with_third = true) {
    at::Tensor hidden = torch::tanh(units[0]->forward(x)) * gain * scale;
    hidden = hidden + torch::tanh(units[1]->forward(hidden));
    if (with_third) hidden = hidden + torch::tanh(units[2]->forward(hidden));
    return units[3]->forward(hidden).to(at::kFloat).square().mean();
  }
  // Returns all of the parameters as they are computed with.
  Values wholes() const {
    Values all{gain, scale};
    for (const Linear& layer : layers) {
      all.push_back(layer->weight);
      all.push_back(layer->bias);
    }
    return values_of(all);
  }
  std::vector<Linear> layers;
  std::vector<Sharded<Linear>> units;
  at::Tensor gain, scale;
};
TORCH_MODULE(DeepNet);

c10::Device device_of(const ThreadRank& rank, bool on_sim) {
  return on_sim ? sim_device(rank.where.rank) : c10::Device(c10::kCPU);
}

// Every way in which gradients come, and what they leave.
template <typename Optimizer>
Values train_in_all_ways(ThreadRank& rank, FsdpOptions options, bool on_sim) {
  options.communicator = rank.communicator;
  const c10::Device device = device_of(rank, on_sim);
  DeepNet net(options, device);
  auto model = fully_shard(net, options);
  Optimizer optimizer(model->parameters(), AdamWOptions(0.01));
  const auto backward = [&](int64_t batch, bool with_third = true) {
    model->forward(part_of_batch(batch, rank.where).to(device), with_third).backward();
  };
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    backward(step);
    trireme::step(optimizer);
  }
  optimizer.zero_grad();
  backward(3, /*with_third=*/rank.where.rank != 0);
  {
    const auto guard = model->no_sync();
    backward(4);
  }
  backward(5);  // is added to what is there
  Values found{model->clip_grad_norm_(0.05).cpu()};
  trireme::step(optimizer);
  optimizer.zero_grad();
  model->set_manual_backward_finalization(true);
  backward(6);
  model->finalize_backward();
  trireme::step(optimizer);
  model->unshard();
  for (const at::Tensor& value : net->wholes()) found.push_back(value);
  return found;
}

template <typename Optimizer>
void check_like_cpu(int64_t world, const FsdpOptions& options, double tolerance = 1e-6) {
  const auto on_cpu = on_ranks<Values>(world, Engine::kGloo, [&](ThreadRank& rank) {
    return train_in_all_ways<Optimizer>(rank, options, false);
  });
  for (const SimGroup kind : {SimGroup::kBesideGloo, SimGroup::kAlone}) {
    const auto on_sim = on_sim_ranks<Values>(
        world, [&](ThreadRank& rank) { return train_in_all_ways<Optimizer>(rank, options, true); },
        kind);
    for (size_t rank = 0; rank < on_cpu.size(); ++rank) {
      CAPTURE(rank, kind);
      CHECK(count_unlike(on_sim[rank], on_cpu[rank], tolerance) == 0);
    }
  }
}

Offload offload_of(double optimizer, double params) {
  return {.optimizer = optimizer, .params = params};
}

}  // namespace

TEST_CASE("ranks on devices train as one process does on the whole batch") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 5);
  for (const int64_t world : {1, 2, 3}) {
    CAPTURE(world);
    const auto found = on_sim_ranks<Values>(world, [&](ThreadRank& rank) {
      const c10::Device device = sim_device(rank.where.rank);
      UnevenNet net;
      move_to(*net, device);
      auto model = fully_shard(net, over(rank));
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        model->forward(part_of_batch(step, rank.where).to(device), step % 2 == 0).backward();
        trireme::step(optimizer);
      }
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("units in a unit, in all ways of training, resharded or not") {
  check_like_cpu<AdamW>(2, {});
  check_like_cpu<optim::AdamW>(3, {.reshard_after_forward = true});
  check_like_cpu<AdamW>(2, {.reshard_after_forward = false});
}

TEST_CASE("mixed precision on devices") {
  check_like_cpu<AdamW>(2, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, 1e-3);
}

TEST_CASE("replicas of shards, and pieces among neighbours, on devices") {
  check_like_cpu<AdamW>(4, {.shard_among = 2});
  check_like_cpu<AdamW>(4, {.reshard_among = 2});
}

TEST_CASE("what is offloaded goes through pinned memory, and trains the same") {
  for (const auto& [optimizer, params] : {std::pair{0.5, 0.25}, {1.0, 0.0}, {1.0, 1.0}}) {
    CAPTURE(optimizer, params);
    for (const int64_t world : {1, 2})
      check_like_cpu<AdamW>(world, {.offload = offload_of(optimizer, params)});
    check_like_cpu<optim::AdamW>(2, {.offload = offload_of(optimizer, params)});
  }
}

TEST_CASE("saved on devices, and loaded on others and on the CPU") {
  const TemporaryFolder folder;
  std::vector<Values> trained(2);
  std::vector<Values> loaded(2);
  const auto make = [](ThreadRank& rank, bool on_sim, FsdpOptions options) {
    options.communicator = rank.communicator;
    DeepNet net(options, device_of(rank, on_sim));
    return std::pair(net, fully_shard(net, options));
  };
  const auto step = [](auto& model, ThreadRank& rank, bool on_sim) {
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    model->forward(part_of_batch(0, rank.where).to(device_of(rank, on_sim))).backward();
    trireme::step(optimizer);
  };
  run_sim_ranks(2, [&](ThreadRank& rank) {
    auto [net, model] = make(rank, true, {.offload = offload_of(0.5, 0.25)});
    step(model, rank, true);
    save_checkpoint(folder.at("saved"), *model, {.communicator = rank.communicator});
    model->unshard();
    trained[static_cast<size_t>(rank.where.rank)] = net->wholes();

    auto [plain_net, plain] = make(rank, true, {});
    load_checkpoint(folder.at("saved"), *plain, {.communicator = rank.communicator});
    std::stringstream saved;
    torch::save(plain, saved);
    auto [again_net, again] = make(rank, true, {});
    torch::load(again, saved);
    again->unshard();
    loaded[static_cast<size_t>(rank.where.rank)] = again_net->wholes();
  });
  for (const Values& values : loaded) CHECK(count_unlike(values, trained[0], 0) == 0);
  const auto on_cpu = on_ranks<Values>(2, Engine::kGloo, [&](ThreadRank& rank) {
    auto [net, model] = make(rank, false, {});
    load_checkpoint(folder.at("saved"), *model, {.communicator = rank.communicator});
    model->unshard();
    return net->wholes();
  });
  for (const Values& values : on_cpu) CHECK(count_unlike(values, trained[0], 0) == 0);
}

TEST_CASE("pinned memory that is refused is named") {
  std::string said;
  refuse_pinned(true);
  run_sim_ranks(1, [&](ThreadRank& rank) {
    said = error_of([&] {
      const FsdpOptions options{.communicator = rank.communicator, .offload = Offload{}};
      DeepNet(options, sim_device(0));
    });
  });
  refuse_pinned(false);
  CHECK_THAT(said, Catch::Contains("[fully_shard] got no pinned memory for the offloaded part of "
                                   "'weight': sim refuses to lock pages"));
  CHECK_THAT(said, Catch::Contains("Pass pin_memory=False"));
}

TEST_CASE("a gather without memory says what it needed, and frees what it had") {
  std::string said;
  int64_t before = 0;
  int64_t after = 0;
  run_sim_ranks(1, [&](ThreadRank& rank) {
    FsdpOptions options = over(rank);
    options.reshard_after_forward = true;
    DeepNet net(options, sim_device(0));
    auto model = fully_shard(net, options);
    const at::Tensor batch = whole_batch(0).to(sim_device(0));
    model->forward(batch).backward();
    model->zero_grad();
    before = sim_bytes();
    limit_sim_bytes(0);
    said = error_of([&] { model->forward(batch).backward(); });
    limit_sim_bytes(-1);
    after = sim_bytes();
    model->forward(batch).backward();
  });
  CHECK_THAT(said, Catch::Contains("[buffer_pool] got no memory for "));
  CHECK(after <= before);
}

}  // namespace trireme::fsdp_device_test
