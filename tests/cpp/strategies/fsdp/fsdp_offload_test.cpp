// What of a sharded C++ module lies in CPU memory. There is no other device here, so units are told
// that theirs is one; what is copied and when is then what it would be elsewhere.

#include <trireme/saving/module_checkpoint.h>

#include <torch/serialize.h>

#include <catch_torch.h>
#include <mutex>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::fsdp_offload_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

Offload offload_of(double optimizer, double params) {
  return {.optimizer = optimizer, .params = params, .pin_memory = false, .from_cpu = true};
}

// None, some of each kind, and all of either.
std::vector<std::optional<Offload>> kinds_of_offload() {
  return {std::nullopt, offload_of(0.5, 0.25), offload_of(1, 0), offload_of(1, 1)};
}

template <typename Result>
std::vector<Result> on_gloo_ranks(const std::function<Result(ThreadRank&)>& main) {
  return on_ranks<Result>(2, Engine::kGloo, main);
}

// Every way in which gradients come: fresh, accumulated without and with averaging, and when they
// are asked for.
template <typename Optimizer>
Values train_in_all_ways(ThreadRank& rank, const FsdpOptions& options) {
  UnevenNet net;
  auto model = fully_shard(net, options);
  Optimizer optimizer(model->parameters(), AdamWOptions(0.01));
  const auto backward = [&](int64_t batch) {
    model->forward(part_of_batch(batch, rank.where), batch % 2 == 0).backward();
  };
  for (int64_t step = 0; step < 3; ++step) fsdp_step(model, optimizer, step, rank.where);
  optimizer.zero_grad();
  {
    const auto guard = model->no_sync();
    backward(3);
  }
  backward(4);
  backward(5);  // is added to what is there
  Values found{model->clip_grad_norm_(0.05)};
  trireme::step(optimizer);
  optimizer.zero_grad(/*set_to_none=*/false);
  model->set_manual_backward_finalization(true);
  backward(6);
  model->finalize_backward();
  trireme::step(optimizer);
  for (const at::Tensor& value : whole_values(*model, net->parameters())) found.push_back(value);
  return found;
}

// Trains so with each kind of offload.
template <typename Optimizer>
std::vector<Values> train_with_kinds(const FsdpOptions& options) {
  const auto by_rank = on_gloo_ranks<std::vector<Values>>([&](ThreadRank& rank) {
    std::vector<Values> found;
    FsdpOptions own = options;
    own.communicator = rank.communicator;
    for (const auto& offload : kinds_of_offload()) {
      own.offload = offload;
      found.push_back(train_in_all_ways<Optimizer>(rank, own));
    }
    return found;
  });
  for (size_t i = 0; i < by_rank[0].size(); ++i)
    CHECK(count_unlike(by_rank[0][i], by_rank[1][i], 0) == 0);
  return by_rank[0];
}

// Three layers, each a unit, in one that has nothing of its own.
Sharded<Sequential> layers_of(const FsdpOptions& options) {
  std::vector<Linear> layers;
  {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(5);
    layers = {Linear(6, 8), Linear(8, 8), Linear(8, 2)};
  }
  Sequential net;
  for (const Linear& layer : layers) net->push_back(fully_shard(layer, options));
  return fully_shard(net, options);
}

void step_layers(Sharded<Sequential>& model, int64_t step, RankOf where) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  optimizer.zero_grad();
  model->forward(part_of_batch(step, where)).square().mean().backward();
  trireme::step(optimizer);
}

// Draws each parameter: A, o or - as in offload_plan_test.cpp, and ! if it is offloaded and its
// gradient, which is a copy then, has not come or lies in a bucket.
std::string drawn(ShardedModule& model) {
  std::string picture;
  for (const auto& item : model.named_modules()) {
    const auto* unit = dynamic_cast<const ShardedModule*>(item.value().get());
    if (unit == nullptr) continue;
    for (const ShardedParam* param : unit->sharded_params()) {
      const ShardOffload offload = param->spec().offload;
      picture += offload == ShardOffload::kAll ? 'A' : offload == ShardOffload::kNone ? '-' : 'o';
      const at::Tensor& grad = param->sharded().grad();
      const bool is_alone = grad.defined() && grad.storage().nbytes() == grad.nbytes();
      if (offload != ShardOffload::kNone && !is_alone) picture += '!';
    }
  }
  return picture;
}

struct Heard final : c10::WarningHandler {
  void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
  std::string text;
};

}  // namespace

TEST_CASE("what is offloaded trains as what is not, bit by bit, and as one process") {
  const std::vector<Values> torchs = train_with_kinds<AdamW>({});
  const std::vector<Values> ours = train_with_kinds<optim::AdamW>({});
  for (size_t i = 1; i < torchs.size(); ++i) {
    CAPTURE(i);
    CHECK(count_unlike(torchs[i], torchs[0], 0) == 0);
    CHECK(count_unlike(ours[i], ours[0], 0) == 0);
  }
  CHECK(count_unlike(ours[0], torchs[0]) == 0);

  UnevenNet alone;
  AdamW plain(alone->parameters(), AdamWOptions(0.01));
  train(alone, plain, 3);
  plain.zero_grad();
  for (const int64_t batch : {3, 4, 5})
    alone->forward(whole_batch(batch), batch % 2 == 0).backward();
  torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.05);
  plain.step();
  plain.zero_grad(/*set_to_none=*/false);
  alone->forward(whole_batch(6)).backward();
  plain.step();
  const Values trained(torchs[1].begin() + 1, torchs[1].end());  // after the norm
  CHECK(count_unlike(trained, values_of(alone->parameters())) == 0);
}

TEST_CASE("the same where forward and backward read another dtype") {
  const std::vector<Values> found =
      train_with_kinds<AdamW>({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  for (size_t i = 1; i < found.size(); ++i) CHECK(count_unlike(found[i], found[0], 0) == 0);
}

TEST_CASE("units that are given copies of one Offload meet its fractions together") {
  const auto pictures = on_gloo_ranks<std::string>([](ThreadRank& rank) {
    std::string all;
    for (const auto& offload : {offload_of(0.5, 0.25), offload_of(0.5, 0.5), offload_of(1, 0.5)}) {
      auto model = layers_of({.communicator = rank.communicator, .offload = offload});
      step_layers(model, 0, rank.where);
      all += drawn(*model) + " ";
    }
    return all;
  });
  for (const std::string& picture : pictures) CHECK(picture == "o---AA A---AA AoooAA ");
}

TEST_CASE("what is offloaded is saved and loaded as what is not") {
  const TemporaryFolder folder;
  const auto found = on_gloo_ranks<std::vector<Values>>([&](ThreadRank& rank) {
    const auto make = [&](const std::optional<Offload>& offload) {
      return layers_of({.communicator = rank.communicator, .offload = offload});
    };
    auto plain = make(std::nullopt);
    auto model = make(offload_of(0.5, 0.25));
    for (auto* trained : {&plain, &model}) step_layers(*trained, 0, rank.where);
    std::stringstream saved;
    torch::save(model, saved);
    save_checkpoint(folder.at("checkpoint"), *model, {.communicator = rank.communicator});
    auto loaded = make(offload_of(1, 1));
    torch::load(loaded, saved);
    auto read = make(offload_of(1, 0));
    load_checkpoint(folder.at("checkpoint"), *read, {.communicator = rank.communicator});
    std::vector<Values> shards;
    for (auto* trained : {&plain, &loaded, &read}) {
      step_layers(*trained, 1, rank.where);
      shards.push_back(values_of((*trained)->parameters()));
    }
    return shards;
  });
  for (const std::vector<Values>& shards : found)
    for (const size_t i : {1, 2}) CHECK(count_unlike(shards[i], shards[0], 0) == 0);
}

TEST_CASE("pinned memory that is refused, and fractions that are none") {
  if (at::globalContext().hasCUDA()) return;  // where there is some
  std::vector<std::string> said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const auto refused = [&](const Offload& offload) {
      return error_of([&] { layers_of({.communicator = rank.communicator, .offload = offload}); });
    };
    std::string& text = said[static_cast<size_t>(rank.where.rank)];
    text = refused({.from_cpu = true}) + refused({.optimizer = 0.5, .params = 1});
  });
  for (const std::string& text : said) {
    CHECK_THAT(text, Catch::Contains("[fully_shard] got no pinned memory for the offloaded part of "
                                     "'weight'"));
    CHECK_THAT(text, Catch::Contains("Pass pin_memory=False"));
    CHECK_THAT(text, Catch::Contains("got Offload(optimizer=0.5, params=1), expected 0 <= params"));
  }
}

TEST_CASE("on CPU there is nothing to do, and rank 0 says so") {
  const c10::WarningUtils::WarnAlways always(true);
  std::vector<std::string> heard(2);
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto pictures = on_ranks<std::string>(2, engine, [&](ThreadRank& rank) {
      Heard handler;
      const c10::WarningUtils::WarningHandlerGuard guard(&handler);
      auto model = layers_of({.communicator = rank.communicator, .offload = Offload{}});
      step_layers(model, 0, rank.where);
      heard[static_cast<size_t>(rank.where.rank)] = handler.text;
      return drawn(*model);
    });
    CHECK(pictures == std::vector<std::string>(2, "------"));
    CHECK_THAT(heard[0], Catch::Contains("[fully_shard] Offload: parameters are in CPU memory"));
    CHECK(heard[1] == "");
  }
}

}  // namespace trireme::fsdp_offload_test
