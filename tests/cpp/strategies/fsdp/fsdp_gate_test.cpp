// The gate of fully_shard for C++ modules: writes inside and outside, ranks that fail, archives,
// what is refused.

#include <torch/nn/utils.h>
#include <torch/serialize.h>

#include <atomic>
#include <catch_torch.h>
#include <functional>
#include <limits>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <vector>

namespace trireme::fsdp_gate_test {

using namespace trireme::test;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Texts = std::vector<std::string>;

namespace {

void fill(const at::Tensor& parameter, double value) {
  const at::NoGradGuard no_grad;
  parameter.fill_(value);
}

// What a saved model holds, as a plain one.
Values values_in(const std::string& saved) {
  UnevenNet plain;
  std::istringstream stream(saved);
  torch::load(plain, stream);
  return values_of(plain->parameters());
}

template <typename Model>
std::string archive_of(const Model& model) {
  std::ostringstream stream;
  torch::save(model, stream);
  return stream.str();
}

// Throws in its backward.
struct StumbleFunction : torch::autograd::Function<StumbleFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*grads*/) {
    TORCH_CHECK(false, "stumbled over a stone");
  }
};

struct StumblingNetImpl : torch::nn::Module {
  StumblingNetImpl() { layer = register_module("layer", UnevenNet()); }
  at::Tensor forward(const at::Tensor& x, bool stumbles) {
    return layer->forward(stumbles ? StumbleFunction::apply(x * layer->gain) : x);
  }
  UnevenNet layer{nullptr};
};
TORCH_MODULE(StumblingNet);

}  // namespace

TEST_CASE("a step around the gate raises in the next forward, once, naming the parameter") {
  const auto said = on_shm_ranks<Texts>(2, [](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    fsdp_step(model, optimizer, 0, rank.where);
    model->forward(part_of_batch(0, rank.where)).backward();
    optimizer.step();
    const auto forward = [&] { model->forward(part_of_batch(0, rank.where)); };
    return Texts{error_of(forward), error_of(forward)};
  });
  for (const Texts& texts : said) {
    CHECK_THAT(texts[0],
               Catch::Contains("[fully_shard] parameter 'gain' was written after a forward"));
    CHECK_THAT(texts[0], Catch::Contains("begin_writing()"));
    CHECK(texts[1] == "no error");
  }
}

TEST_CASE("the same of parameters that are sharded along their last dimension, read in bf16") {
  const auto said = on_shm_ranks<std::string>(2, [](ThreadRank& rank) {
    const auto last_dim = [](const std::string&, const at::Tensor&) { return int64_t{1}; };
    auto model = fully_shard(
        torch::nn::Linear(torch::nn::LinearOptions(6, 4).bias(false)),
        {.param_dtype = at::kBFloat16, .communicator = rank.communicator, .shard_dim = last_dim});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    const at::Tensor batch = at::ones({2, 6});
    model->forward(batch).sum().backward();
    optimizer.step();
    return error_of([&] { model->forward(batch); });
  });
  for (const std::string& text : said)
    CHECK_THAT(text, Catch::Contains("[fully_shard] parameter 'weight' was written after a forw"));
}

TEST_CASE("torch's clip_grad_norm_, by a norm of each rank's own, raises on all ranks") {
  const auto said = on_shm_ranks<Texts>(3, [](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    const auto step_after = [&](const std::function<void()>& change) {
      optimizer.zero_grad();
      {
        auto guard = model->no_sync();
        model->forward(part_of_batch(1, rank.where)).backward();
      }
      model->forward(part_of_batch(0, rank.where)).backward();
      change();
      return error_of([&] { trireme::step(optimizer); });
    };
    const auto clip = [&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01); };
    const auto by_element = [&] { torch::nn::utils::clip_grad_value_(model->parameters(), 1e-3); };
    const auto by_number = [&](double number) {
      for (const at::Tensor& shard : model->parameters())
        if (shard.grad().defined()) shard.grad().data().mul_(number);
    };
    const auto on_one_rank = [&] {
      if (rank.where.rank == 2) by_number(0.5);
    };
    return Texts{step_after(clip), step_after(on_one_rank),
                 step_after([&] { model->clip_grad_norm_(0.01); }), step_after(by_element),
                 step_after([&] { by_number(1.0 / 65536); }), step_after([] {}),
                 // The last one: nothing is finite afterwards.
                 step_after([&] { by_number(std::numeric_limits<double>::infinity()); })};
  });
  for (const Texts& texts : said) {
    for (const size_t refused : {0, 1}) {
      CHECK_THAT(texts[refused],
                 Catch::Contains("[fully_shard] gradients were multiplied by factors that differ"));
      CHECK_THAT(texts[refused], Catch::Contains("Clip with model->clip_grad_norm_(max_norm)"));
    }
    for (size_t passes = 2; passes < texts.size(); ++passes) CHECK(texts[passes] == "no error");
  }
}

TEST_CASE("after a step that was refused the next one is right; few elements refuse nothing") {
  const SGDOptions options(0.1);
  const Values expected = train_alone<SGD>(options, 2);
  std::atomic<int64_t> refused{0};
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), options);
    fsdp_step(model, optimizer, 0, rank.where);
    optimizer.zero_grad();
    model->forward(part_of_batch(1, rank.where)).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01);
    refused += error_of([&] { trireme::step(optimizer); }) != "no error";
    fsdp_step(model, optimizer, 1, rank.where);
    return whole_values(*model, net->parameters());
  });
  CHECK(refused == 2);
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  // Rank 1 has no shard at all of either.
  const auto said = on_shm_ranks<std::string>(2, [](ThreadRank& rank) {
    torch::nn::Linear layer(1, 1);
    auto model = fully_shard(layer, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    model->forward(at::ones({2, 1})).sum().backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01);
    return error_of([&] { trireme::step(optimizer); });
  });
  for (const std::string& text : said) CHECK(text == "no error");
}

TEST_CASE("the module's own members are not to be written, nor replaced") {
  const auto said = on_shm_ranks<Texts>(1, [](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    fsdp_step(model, optimizer, 0, rank.where);
    const auto step = [&] { fsdp_step(model, optimizer, 0, rank.where); };
    fill(net->head->bias, 2);
    Texts texts{error_of(step), error_of(step)};
    net->to(at::kDouble);
    texts.push_back(error_of(step));
    return texts;
  });
  CHECK_THAT(said[0][0], Catch::Contains("[fully_shard] the module's own 'head.bias'"));
  CHECK(said[0][1] == "no error");
  CHECK_THAT(said[0][2], Catch::Contains("[fully_shard] the module's own 'gain'"));
}

TEST_CASE("shards are written before the first forward, after a step, and after begin_writing()") {
  const auto said = on_shm_ranks<Texts>(2, [](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0));
    Texts texts;
    const auto write = [&](double value) {
      fill(model->named_parameters()["second.bias"], value);
      texts.push_back(error_of([&] { fsdp_step(model, optimizer, 0, rank.where); }));
      model->unshard();
      texts.push_back(std::to_string(net->second->bias.sum().item<int>()));
    };
    write(1);
    model->begin_writing();
    write(2);
    fsdp_step(model, optimizer, 0, rank.where);
    write(3);
    return texts;
  });
  for (const Texts& texts : said)
    CHECK(texts == Texts{"no error", "2", "no error", "4", "no error", "6"});
}

TEST_CASE("what moves shards is taken over, and the next step is that of one process") {
  constexpr double kFactor = 0.9;
  const std::vector<std::function<void(at::Tensor&)>> writes = {
      [](at::Tensor& it) { it.mul_(kFactor); }, [](at::Tensor& it) { it.data().mul_(kFactor); },
      [](at::Tensor& it) { it.set_data(it.detach() * kFactor); },
      [](at::Tensor& it) { it.set_(it.detach() * kFactor); }};
  const SGDOptions options = SGDOptions(0.1).momentum(0.9);
  for (size_t number = 0; number <= writes.size(); ++number) {  // the last one loads
    // Before the first step, after one, and between a backward and its step; gradients stay.
    const auto train = [&](auto& model, auto& optimizer, const auto& change, RankOf where) {
      change();
      fsdp_step(model, optimizer, 0, where);
      change();
      model->forward(part_of_batch(1, where)).backward();
      trireme::step(optimizer);
      model->forward(part_of_batch(2, where)).backward();
      change();
      trireme::step(optimizer);
      fsdp_step(model, optimizer, 3, where);
    };
    UnevenNet one;
    SGD plain(one->parameters(), options);
    const auto change_one = [&] {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : one->parameters()) parameter.mul_(kFactor);
    };
    train(one, plain, change_one, RankOf{0, 1});
    for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
      CAPTURE(number, static_cast<int>(engine));
      const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
        UnevenNet net;
        auto model = fully_shard(net, over(rank));
        SGD optimizer(model->parameters(), options);
        const auto change = [&] {
          std::stringstream file;
          if (number == writes.size()) {
            UnevenNet changed;
            const Values whole = whole_values(*model, net->parameters());
            for (size_t i = 0; i < whole.size(); ++i)
              changed->parameters()[i].set_data(whole[i] * kFactor);
            torch::save(changed, file);
          }
          model->begin_writing();
          const at::NoGradGuard no_grad;
          if (number == writes.size()) return torch::load(model, file);
          for (at::Tensor& shard : model->parameters()) writes[number](shard);
        };
        train(model, optimizer, change, rank.where);
        return whole_values(*model, net->parameters());
      });
      for (const Values& values : found)
        CHECK(count_unlike(values, values_of(one->parameters())) == 0);
    }
  }
}

TEST_CASE("one rank evaluates between steps, more often than the others") {
  const SGDOptions options(0.1);
  const Values expected = train_alone<SGD>(options, 5);
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), options);
    for (int64_t step = 0; step < 5; ++step) {
      fsdp_step(model, optimizer, step, rank.where);
      const at::NoGradGuard no_grad;
      for (int64_t batch = 0; batch < 3 * rank.where.rank; ++batch)
        model->forward(part_of_batch(batch, rank.where));
    }
    return whole_values(*model, net->parameters());
  });
  for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
}

TEST_CASE("an optimizer of parameters as they were before is refused") {
  const auto said = on_shm_ranks<Texts>(1, [](ThreadRank& rank) {
    UnevenNet net;
    SGD before(net->parameters(), SGDOptions(0.1));
    optim::SGD ours(net->parameters(), SGDOptions(0.1));
    auto model = fully_shard(net, over(rank));
    return Texts{error_of([&] { trireme::step(before); }), error_of([&] { ours.step(); })};
  });
  for (const std::string& text : said[0])
    CHECK_THAT(text, Catch::Contains("parameters as they were before fully_shard"));
}

TEST_CASE("a backward that throws on one rank does so on all, and training goes on") {
  std::vector<Texts> said(2);
  const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    StumblingNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int64_t step = 0; step < 4; ++step) {
      const bool stumbles = step == 1 && rank.where.rank == 1;
      said[static_cast<size_t>(rank.where.rank)].push_back(error_of([&] {
        optimizer.zero_grad();
        model->forward(part_of_batch(step, rank.where), stumbles).backward();
        trireme::step(optimizer);
      }));
      if (step == 1) model->reset_iter_state();
    }
    return whole_values(*model, net->parameters());
  });
  CHECK_THAT(said[1][1], Catch::Contains("stumbled over a stone"));
  CHECK_THAT(said[0][1], Catch::Contains("was abandoned"));
  for (const Texts& texts : said) {
    CHECK(texts[0] == "no error");
    CHECK(texts[2] == "no error");
    CHECK(texts[3] == "no error");
  }
  CHECK(count_unlike(found[0], found[1], 0) == 0);
}

TEST_CASE("archives hold whole parameters, and load into any number of ranks") {
  std::string of_plain;
  {
    UnevenNet plain;
    fill(plain->second->weight, 3);
    of_plain = archive_of(plain);
  }
  std::string saved;
  const auto loaded = on_shm_ranks<Values>(3, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    fsdp_step(model, optimizer, 0, rank.where);
    model->unshard();
    std::istringstream stream(of_plain);
    torch::load(model, stream);
    Values values = whole_values(*model, net->parameters());
    fsdp_step(model, optimizer, 0, rank.where);
    model->unshard();
    if (rank.where.rank == 1) saved = archive_of(model);  // one is enough
    return values;
  });
  for (const Values& values : loaded) CHECK(count_unlike(values, values_in(of_plain), 0) == 0);
  const auto again = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    std::istringstream stream(saved);
    torch::load(model, stream);
    return whole_values(*model, net->parameters());
  });
  for (const Values& values : again) CHECK(count_unlike(values, values_in(saved), 0) == 0);
}

TEST_CASE("an archive of another model is refused, and nothing of it is left") {
  const auto said = on_shm_ranks<Texts>(2, [](ThreadRank& rank) {
    torch::nn::Linear other(3, 5), layer(4, 5);
    auto model = fully_shard(layer, over(rank));
    model->unshard();
    const at::Tensor before = layer->weight.clone();
    std::istringstream stream(archive_of(other));
    Texts texts{error_of<c10::ValueError>([&] { torch::load(model, stream); })};
    model->unshard();
    texts.push_back(at::equal(layer->weight, before) ? "as it was" : "changed");
    return texts;
  });
  for (const Texts& texts : said) {
    CHECK_THAT(texts[0], Catch::Contains("[fully_shard] got 'weight' as Float of shape (5, 3), "
                                         "expected Float of shape (5, 4) or this rank's part"));
    CHECK(texts[1] == "as it was");
  }
}

TEST_CASE("fully_shard refuses what it cannot shard") {
  const auto said = on_shm_ranks<Texts>(1, [](ThreadRank& rank) {
    const FsdpOptions options = over(rank);
    const auto refusal = [&](auto module) {
      return error_of<c10::Error>([&] { fully_shard(module, options); });
    };
    torch::nn::Linear layer(4, 5);
    auto model = fully_shard(layer, options);
    torch::nn::Sequential sharing;
    sharing->push_back("head", layer);
    UnevenNet on_meta;
    on_meta->register_parameter("hollow", at::empty({2, 2}, at::kMeta));
    UnevenNet sparse;
    sparse->register_parameter("thin", at::eye(2).to_sparse());
    Texts texts{refusal(layer),   refusal(model), refusal(sharing), refusal(torch::nn::Tanh()),
                refusal(on_meta), refusal(sparse)};
    texts.push_back(error_of([&] { model->to(at::kDouble); }));
    texts.push_back(error_of([&] { model->to(at::kMeta); }));
    texts.push_back(error_of([&] { model->to(at::kCPU, at::kFloat); }));
    texts.push_back(error_of([&] { model->clone(); }));
    return texts;
  });
  const Texts& texts = said[0];
  CHECK_THAT(texts[0], Catch::Contains("[fully_shard] got 'weight', which is sharded already"));
  CHECK_THAT(texts[1], Catch::Contains("which is sharded already"));
  CHECK_THAT(texts[2],
             Catch::Contains("[fully_shard] got 'head.weight', which is sharded already"));
  CHECK_THAT(texts[3], Catch::Contains("which has no parameters"));
  CHECK_THAT(texts[4], Catch::Contains("[fully_shard] got 'hollow' on meta"));
  CHECK_THAT(texts[5], Catch::Contains("[fully_shard] got 'thin' of a sparse layout"));
  CHECK_THAT(texts[6],
             Catch::Contains("[fully_shard] got to(Double) of a sharded module of Float"));
  CHECK_THAT(texts[7], Catch::Contains("[fully_shard] got to(meta)"));
  CHECK(texts[8] == "no error");
  CHECK_THAT(texts[9], Catch::Contains("[fully_shard] got clone()"));
}

TEST_CASE("modules that differ between the ranks are refused on all") {
  const auto said = on_shm_ranks<std::string>(2, [](ThreadRank& rank) {
    torch::nn::Linear layer(4, 5 + rank.where.rank);
    return error_of<c10::ValueError>([&] { fully_shard(layer, over(rank)); });
  });
  for (const std::string& text : said) CHECK_THAT(text, Catch::Contains("[fully_shard]"));
}

TEST_CASE("the outermost unit is used first") {
  const auto said = on_shm_ranks<std::string>(1, [](ThreadRank& rank) {
    const auto inner = fully_shard(torch::nn::Linear(6, 6), over(rank));
    torch::nn::Sequential net;
    net->push_back("inner", inner);
    net->push_back("last", torch::nn::Linear(6, 2));
    auto model = fully_shard(net, over(rank));
    inner.ptr()->forward(whole_batch(0));
    return error_of([&] { model->forward(whole_batch(0)); });
  });
  CHECK_THAT(said[0], Catch::Contains("expected the outermost unit first"));
}

TEST_CASE("a rank that is gone ends the forwards of the others, by name") {
  std::string said;
  const std::string thrown = error_of([&] {
    on_shm_ranks<int>(2, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      TORCH_CHECK(rank.where.rank == 0, "gone");
      said = error_of([&] { model->forward(part_of_batch(0, rank.where)); });
      return 0;
    });
  });
  CHECK(thrown == "gone");
  CHECK_THAT(said, Catch::Contains("rank 1"));
}

}  // namespace trireme::fsdp_gate_test
