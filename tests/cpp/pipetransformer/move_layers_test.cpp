// Layers go from the ranks that hold them to those that hold them next, on threads as ranks.

#include <trireme/pipetransformer/move_layers.h>

#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/strategies/pipeline/elastic_plan.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <catch_torch.h>
#include <pipetransformer/wrong.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::move_layers_test {

using namespace trireme::test;
using Catch::Contains;
using Numbers = std::vector<int64_t>;

namespace {

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kBFloat16, at::kDouble,
                                             at::kBool,  at::kLong,     at::kComplexFloat};

at::Tensor values_of(at::ScalarType dtype, at::IntArrayRef sizes, int64_t seed) {
  const int64_t numel = c10::multiply_integers(sizes);
  return (at::arange(numel, at::kLong) * 7 + seed).remainder(120).view(sizes).to(dtype);
}

// One layer: a matrix, a parameter of each dtype, an image filter in channels_last, a scalar, a
// tensor without elements, and the states of an optimizer.
struct Layer {
  NamedTensors tensors;
  NamedTensors state;
  std::string values;

  explicit Layer(int64_t seed) : values("{\"seed\": " + std::to_string(seed) + "}") {
    tensors.emplace_back("weight", values_of(at::kFloat, {17, 9}, seed).set_requires_grad(true));
    for (const at::ScalarType dtype : kDtypes)
      tensors.emplace_back(c10::toString(dtype), values_of(dtype, {5, 3}, seed));
    const at::Tensor filter = values_of(at::kFloat, {4, 3, 2, 2}, seed);
    tensors.emplace_back("filter", filter.contiguous(at::MemoryFormat::ChannelsLast));
    tensors.emplace_back("scalar", values_of(at::kDouble, {}, seed + 1));
    tensors.emplace_back("none", at::empty({0, 3}));
    state.emplace_back("weight.exp_avg", values_of(at::kFloat, {17, 9}, seed + 2));
    state.emplace_back(
        "filter.exp_avg",
        values_of(at::kFloat, {4, 3, 2, 2}, seed + 4).contiguous(at::MemoryFormat::ChannelsLast));
    state.emplace_back("weight.step", at::scalar_tensor(seed + 3, at::kFloat));
  }

  void free() {
    for (const auto& [name, tensor] : tensors) free_memory(tensor, "held elsewhere");
    state.clear();
    values.clear();
  }
};

bool are_bits(const at::Tensor& one, const at::Tensor& other) {
  const auto bytes = [](const at::Tensor& it) {
    return it.detach().contiguous().view({-1}).view(at::kByte);
  };
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() &&
         (one.numel() == 0 || at::equal(bytes(one), bytes(other)));
}

void check_equal(Wrong& wrong, const NamedTensors& got, const NamedTensors& expected,
                 const std::string& where) {
  if (got.size() != expected.size()) return wrong.add(where + ": other tensors");
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i].first != expected[i].first || !has_memory(got[i].second) ||
        !are_bits(got[i].second, expected[i].second))
      wrong.add(where + ": '" + got[i].first + "' differs");
}

// What one rank has of a run: all layers, those that it does not hold without memory.
struct Held {
  std::vector<Layer> layers;
  ElasticPlan plan;
  int64_t rank;

  Held(ElasticPlan first, int64_t own) : plan(std::move(first)), rank(own) {
    const auto holders = layer_holders(plan);
    for (size_t i = 0; i < holders.size(); ++i) {
      layers.emplace_back(static_cast<int64_t>(100 * i));
      if (!is_in(holders[i])) layers.back().free();
    }
  }

  bool is_in(const Numbers& ranks) const {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }

  std::vector<LayerMove> moves_to(const ElasticPlan& next) const {
    const auto before = layer_holders(plan);
    const auto after = layer_holders(next);
    std::vector<LayerMove> moves;
    for (size_t i = 0; i < layers.size(); ++i)
      moves.push_back({"layer" + std::to_string(i), before[i], after[i], layers[i].tensors,
                       layers[i].state, layers[i].values});
    return moves;
  }

  void move_to(const ElasticPlan& next, Communicator& ranks) {
    auto moved = move_layers(moves_to(next), plan_text(next), &ranks);
    const auto after = layer_holders(next);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (moved[i]) {
        layers[i].state = std::move(moved[i]->state);
        layers[i].values = std::move(moved[i]->values);
      }
      if (!is_in(after[i])) layers[i].free();
    }
    plan = next;
  }

  void check(Wrong& wrong) const {
    const auto holders = layer_holders(plan);
    for (size_t i = 0; i < layers.size(); ++i) {
      const std::string where =
          "rank " + std::to_string(rank) + ", " + plan_text(plan) + ", layer " + std::to_string(i);
      const Layer& layer = layers[i];
      if (!is_in(holders[i])) {
        if (has_memory(layer.tensors.front().second)) wrong.add(where + ": not freed");
        continue;
      }
      const Layer expected(static_cast<int64_t>(100 * i));
      check_equal(wrong, layer.tensors, expected.tensors, where);
      check_equal(wrong, layer.state, expected.state, where);
      if (layer.values != expected.values) wrong.add(where + ": other values");
      if (!layer.tensors.front().second.requires_grad()) wrong.add(where + ": not trained");
    }
  }
};

std::string text_of_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("layers reach their holders under the next plan, bit for bit") {
  const std::vector<ElasticPlan> plans = {{2, 2, {4, 2}},       {1, 4, {6}}, {4, 1, {2, 1, 2, 1}},
                                          {4, 1, {1, 1, 1, 3}}, {1, 4, {6}}, {2, 2, {1, 5}},
                                          {4, 1, {1, 2, 2, 1}}};
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    Wrong wrong;
    run_thread_ranks(
        4,
        [&](ThreadRank& rank) {
          Held held({4, 1, {1, 2, 2, 1}}, rank.where.rank);
          const auto* parameter = held.layers[0].tensors[0].second.unsafeGetTensorImpl();
          held.check(wrong);
          for (const ElasticPlan& plan : plans) {
            held.move_to(plan, *rank.communicator);
            held.check(wrong);
          }
          if (held.layers[0].tensors[0].second.unsafeGetTensorImpl() != parameter)
            wrong.add("a parameter is another tensor");
        },
        std::chrono::seconds(30), engine);
    CHECK(wrong.found() == std::vector<std::string>{});
  }
}

TEST_CASE("tensors that have memory are written in place") {
  Wrong wrong;
  run_thread_ranks(3, [&](ThreadRank& rank) {
    const Layer expected(7);
    Layer layer(rank.where.rank == 0 ? 7 : 50);
    const void* memory = layer.tensors[0].second.const_data_ptr();
    const auto version = layer.tensors[0].second._version();
    LayerMove move{"layer", {0}, {0, 2}, layer.tensors, {}, ""};
    if (rank.where.rank == 0) move.state = layer.state;
    const auto moved = move_layers({move}, "a plan", rank.communicator.get());
    if (rank.where.rank == 1 && are_bits(layer.tensors[0].second, expected.tensors[0].second))
      wrong.add("rank 1 was written");
    if (rank.where.rank != 2) return;
    check_equal(wrong, layer.tensors, expected.tensors, "rank 2");
    check_equal(wrong, moved.front()->state, expected.state, "rank 2");
    if (layer.tensors[0].second.const_data_ptr() != memory) wrong.add("other memory");
    if (layer.tensors[0].second._version() == version) wrong.add("the same version");
  });
  CHECK(wrong.found() == std::vector<std::string>{});
}

TEST_CASE("a tensor without memory says why, and shares it with nobody") {
  const at::Tensor whole = at::arange(8, at::kFloat);
  const at::Tensor part = whole.narrow(0, 2, 4);
  at::Tensor parameter = part.detach().view({2, 2});
  parameter.set_requires_grad(true);
  free_memory(parameter, "[area] rank 3 holds it");
  CHECK_FALSE(has_memory(parameter));
  CHECK(at::equal(whole, at::arange(8, at::kFloat)));
  CHECK(parameter.sizes() == at::IntArrayRef({2, 2}));
  CHECK(parameter.requires_grad());
#if TORCH_VERSION_MINOR > 11
  CHECK_THROWS_WITH(parameter.sum(), Contains("rank 3 holds it"));
#endif
  free_memory(parameter, "again");
  const at::Tensor memory = memory_like(parameter).fill_(3);
  take_memory(parameter, memory);
  CHECK(has_memory(parameter));
  CHECK(parameter.sum().item<float>() == 12);
  CHECK(has_memory(at::empty({0})));
}

TEST_CASE("ranks that move differently are refused before anything moves") {
  struct Case {
    std::string expected;
    std::function<void(LayerMove&, std::string& plan, int64_t rank)> change;
  };
  const std::vector<Case> cases = {
      {"ranks that move layers differently: 'the plan a' on rank 0, 'the plan b' on rank 1",
       [](LayerMove&, std::string& plan, int64_t rank) { plan = rank == 1 ? "b" : "a"; }},
      {"'weight' of Float [17, 9]' on rank 0, 'layer 'layer' with 'weight' of Double",
       [](LayerMove& move, std::string&, int64_t rank) {
         if (rank == 1) move.tensors[0].second = at::empty({17, 9}, at::kDouble);
       }},
      {"from ranks [0] to [1]' on rank 0, 'layer 'layer' from ranks [0] to [0, 1]' on rank 1",
       [](LayerMove& move, std::string&, int64_t rank) {
         if (rank == 1) move.after = {0, 1};
       }},
      {"got 'scalar' of layer 'layer' without memory",
       [](LayerMove& move, std::string&, int64_t rank) {
         if (rank == 0) free_memory(move.tensors[8].second, "gone");
       }},
      {"got optimizer state of layer 'layer' on a rank that does not hold it",
       [](LayerMove& move, std::string&, int64_t rank) {
         if (rank == 1) move.values = "{}";
       }},
      {"got ranks [3] of layer 'layer'",
       [](LayerMove& move, std::string&, int64_t rank) {
         if (rank == 1) move.after = {3};
       }},
      {"got other optimizer state of layer 'layer' on rank 1 than on rank 0",
       [](LayerMove& move, std::string&, int64_t rank) {
         move.before = {0, 1};
         move.after = {0, 1, 2};
         if (rank == 1) move.state = {{"weight.exp_avg", at::zeros({17, 9})}};
       }},
  };
  Wrong wrong;
  run_thread_ranks(3, [&](ThreadRank& rank) {
    for (const Case& one : cases) {
      const int64_t number = rank.where.rank;
      Layer layer(number == 0 ? 7 : 50);
      const Layer as_before(number == 0 ? 7 : 50);
      LayerMove move{"layer", {0}, {1}, layer.tensors, {}, ""};
      if (number == 0) move.state = layer.state;
      std::string plan = "a";
      one.change(move, plan, number);
      const std::string text =
          text_of_error([&] { move_layers({move}, plan, rank.communicator.get()); });
      if (text.find(one.expected) == std::string::npos)
        wrong.add("expected " + one.expected + ", got " + text);
      if (!are_bits(layer.tensors[1].second, as_before.tensors[1].second))
        wrong.add("moved after " + one.expected);
    }
    Held held({3, 1, {1, 1, 1}}, rank.where.rank);
    held.move_to({1, 3, {3}}, *rank.communicator);  // the ranks go on
    held.check(wrong);
  });
  CHECK(wrong.found() == std::vector<std::string>{});
}

TEST_CASE("a rank without memory for what comes leaves all layers where they are") {
  Wrong wrong;
  run_thread_ranks(2, [&](ThreadRank& rank) {
    // As many elements as no machine has room for, in the memory of one.
    const at::Tensor huge = at::ones({1}).expand({int64_t{1} << 46});
    Layer small(7);
    NamedTensors tensors = small.tensors;
    tensors.emplace_back("huge", huge);
    if (rank.where.rank == 1)
      for (const auto& [name, tensor] : tensors) free_memory(tensor, "held elsewhere");
    const LayerMove move{"layer", {0}, {0, 1}, tensors, {}, ""};
    const std::string text =
        text_of_error([&] { move_layers({move}, "1 x 2 of 1 layers", rank.communicator.get()); });
    const std::string expected = rank.where.rank == 1
                                     ? "got no memory for the plan 1 x 2 of 1 layers"
                                     : "got the plan 1 x 2 of 1 layers, which rank 1 cannot";
    if (text.find(expected) == std::string::npos) wrong.add("got " + text);
    if (has_memory(small.tensors.front().second) != (rank.where.rank == 0))
      wrong.add("a layer has moved");
  });
  CHECK(wrong.found() == std::vector<std::string>{});
}

TEST_CASE("a rank that leaves a move ends it on all ranks, and layers stay where they are") {
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        Held held({4, 1, {1, 1, 1, 1}}, rank.where.rank);
        if (rank.where.rank == 3)
          return rank.communicator->announce_failure("rank 3 has left the move");
        const std::string text =
            text_of_error([&] { held.move_to({1, 4, {4}}, *rank.communicator); });
        if (text.find("rank 3") == std::string::npos) wrong.add("got " + text);
        held.check(wrong);
      },
      std::chrono::seconds(20), Engine::kShm);
  CHECK(wrong.found() == std::vector<std::string>{});
}

}  // namespace trireme::move_layers_test
