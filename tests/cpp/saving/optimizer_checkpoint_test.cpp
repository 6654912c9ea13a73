// Checkpoints with optimizers from C++: any strategy goes on where another one stopped, at another
// number of ranks, as if nothing had happened.

#include <trireme/saving/module_checkpoint.h>

#include <torch/serialize.h>

#include <algorithm>
#include <catch_torch.h>
#include <cctype>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::optimizer_checkpoint_test {

using namespace trireme::test;

namespace {

enum class Under : uint8_t { kPlain, kDdp, kZero1, kZero2, kFsdp };

struct Stretch {
  int64_t begin = 0;
  int64_t end = 0;
  std::string load = {};
  std::string save = {};
};

constexpr const char* kStretchExtra = R"({"epoch": 3})";

// A JSON text without what stands between its words.
std::string packed(std::string text) {
  std::erase_if(text, [](unsigned char letter) { return std::isspace(letter) != 0; });
  return text;
}

std::string packed_file(const std::string& path) {
  std::ifstream file(path);
  return packed({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
}

int64_t count_in(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t place = text.find(part); place != std::string::npos;
       place = text.find(part, place + 1))
    ++count;
  return count;
}

// Trains over a stretch of steps.
class Trainer {
 public:
  Trainer(ThreadRank& rank, Stretch stretch) : rank_(rank), stretch_(std::move(stretch)) {
    const at::NoGradGuard no_grad;
    if (!stretch_.load.empty())
      for (at::Tensor& parameter : net->parameters()) parameter.add_(1);
  }

  template <typename Optimizer, typename Options>
  Values run(Under under, const Options& options) {
    const auto forward = [&](const auto&... args) { return net->forward(args...); };
    const auto& all = rank_.communicator;
    if (under == Under::kPlain) {
      Optimizer optimizer(net->parameters(), options);
      go(*net, optimizer, forward);
    } else if (under == Under::kZero2) {
      ZeroRedundancyOptimizer<Optimizer> optimizer(net, options, all, {.stage = 2});
      go(*net, optimizer, forward);
    } else if (under == Under::kFsdp) {
      auto model = fully_shard(net, over(rank_));
      Optimizer optimizer(model->parameters(), options);
      go(*model, optimizer, [&](const auto&... args) { return model->forward(args...); });
      return whole_values(*model, net->parameters());
    } else {
      DistributedDataParallel<UnevenNet> model(net, all);
      const auto wrapped = [&](const auto&... args) { return model->forward(args...); };
      if (under == Under::kDdp) {
        Optimizer optimizer(net->parameters(), options);
        go(*model, optimizer, wrapped);
      } else {
        ZeroRedundancyOptimizer<Optimizer> optimizer(net, options, all);
        go(*model, optimizer, wrapped);
      }
    }
    return values_of(net->parameters());
  }

  UnevenNet net;

 private:
  template <typename Optimizer, typename Forward>
  void go(torch::nn::Module& model, Optimizer& optimizer, const Forward& forward) {
    if (!stretch_.load.empty()) {
      const std::string extra = load_checkpoint(
          stretch_.load, model, {.optimizer = &optimizer, .communicator = rank_.communicator});
      TORCH_CHECK(packed(extra) == packed(kStretchExtra), "got extra ", extra);
    }
    for (int64_t step = stretch_.begin; step < stretch_.end; ++step) {
      optimizer.zero_grad();
      forward(part_of_batch(step, rank_.where), step % 2 == 0).backward();
      trireme::step(optimizer);
    }
    if (stretch_.save.empty()) return;
    save_checkpoint(stretch_.save, model,
                    {.optimizer = &optimizer,
                     .extra = kStretchExtra,
                     .max_file_bytes = 500,
                     .communicator = rank_.communicator});
  }

  ThreadRank& rank_;
  Stretch stretch_;
};

template <typename Optimizer, typename Options>
std::vector<Values> run_stretch(std::pair<Under, int64_t> how, const Options& options,
                                const Stretch& stretch) {
  return on_shm_ranks<Values>(how.second, [&](ThreadRank& rank) {
    return Trainer(rank, stretch).template run<Optimizer>(how.first, options);
  });
}

// After three steps under `first` and two under `second`, the rank that differs most from a
// training without a break, in parameters; `other`: what the second optimizer is made with.
template <typename Optimizer, typename Options>
int64_t unlike_after(std::pair<Under, int64_t> first, std::pair<Under, int64_t> second,
                     const Options& options, const Options& other) {
  const TemporaryFolder folder;
  run_stretch<Optimizer>(first, options, {0, 3, "", folder.at("checkpoint")});
  const Values expected = train_alone<Optimizer>(options, 5);
  int64_t most = 0;
  for (const Values& values :
       run_stretch<Optimizer>(second, other, {3, 5, folder.at("checkpoint"), ""})) {
    const int64_t unlike = count_unlike(values, expected);
    most = unlike < 0 ? 1000 : std::max(most, unlike);
  }
  return most;
}

std::string archive_with(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

template <typename Optimizer>
void load_archive(Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// What one rank raises that loads a checkpoint into an optimizer over its own net.
class Refusals {
 public:
  explicit Refusals(ThreadRank& rank) : all_(rank.communicator) {
    net_->first->weight.mutable_grad() = at::ones_like(net_->first->weight);
    AdamW optimizer(net_->parameters(), AdamWOptions(0.01));
    optimizer.step();
    save_checkpoint(path(), *net_, {.optimizer = &optimizer, .communicator = all_});
  }

  std::string path() const { return folder_.at("checkpoint"); }
  UnevenNet& net() { return net_; }

  std::string loading(torch::optim::Optimizer& optimizer) {
    return error_of(
        [&] { load_checkpoint(path(), *net_, {.optimizer = &optimizer, .communicator = all_}); });
  }
  // Does what loading() does, but optimizer.json has `after` in place of `before`.
  std::string loading_changed(torch::optim::Optimizer& optimizer, const std::string& before,
                              const std::string& after) {
    const std::string text = packed_file(path() + "/optimizer.json");
    std::string changed = text;
    TORCH_CHECK(text.find(before) != std::string::npos, "got ", text);
    write_text(changed.replace(text.find(before), before.size(), after));
    const std::string error = loading(optimizer);
    write_text(text);
    return error;
  }

 private:
  // Writes its length into the index, too, and takes the checksums out, which would tell that it
  // was changed.
  void write_text(const std::string& text) const {
    std::ofstream(path() + "/optimizer.json") << text;
    const std::string file = path() + "/model.safetensors.index.json";
    auto index = nlohmann::ordered_json::parse(packed_file(file));
    auto& ours = index.at("metadata").at("trireme");
    ours.at("other_file_bytes").at("optimizer.json") = text.size();
    for (const char* key : {"checksum", "chunk_bytes", "chunk_checksums", "other_file_checksums"})
      ours.erase(key);
    std::ofstream(file) << index.dump();
  }

  TemporaryFolder folder_;
  std::shared_ptr<Communicator> all_;
  UnevenNet net_;
};

}  // namespace

TEST_CASE("any strategy goes on with the optimizer that another one saved") {
  const auto options = AdamWOptions(0.01).weight_decay(0.1).amsgrad(true);
  const auto other = AdamWOptions(0.5).betas({0.5, 0.5});
  using Case = std::pair<Under, int64_t>;
  const std::vector<Case> cases = {
      {Under::kPlain, 1}, {Under::kDdp, 2}, {Under::kZero2, 3}, {Under::kFsdp, 2}};
  for (const Case& first : cases)
    for (const Case& second : {Case{Under::kPlain, 1}, Case{Under::kZero1, 3},
                               Case{Under::kZero2, 2}, Case{Under::kFsdp, 3}})
      CHECK(unlike_after<AdamW>(first, second, options, other) == 0);
}

TEST_CASE("every class of optimizers goes on") {
  using namespace torch::optim;
  const std::pair<Under, int64_t> plain{Under::kPlain, 1}, zero{Under::kZero2, 3},
      sharded{Under::kFsdp, 2};
  CHECK(unlike_after<Adam>(plain, sharded, AdamOptions(0.01), AdamOptions(0.5)) == 0);
  CHECK(unlike_after<SGD>(sharded, zero, SGDOptions(0.05).momentum(0.9), SGDOptions(0.5)) == 0);
  CHECK(unlike_after<SGD>(zero, plain, SGDOptions(0.05), SGDOptions(0.5)) == 0);
  CHECK(unlike_after<Adagrad>(sharded, zero, AdagradOptions(0.05).lr_decay(0.1),
                              AdagradOptions(0.5)) == 0);
  CHECK(unlike_after<RMSprop>(zero, sharded, RMSpropOptions(0.01).momentum(0.5).centered(true),
                              RMSpropOptions(0.5)) == 0);
  CHECK(unlike_after<optim::AdamW>(sharded, zero, AdamWOptions(0.01), AdamWOptions(0.5)) == 0);
  CHECK(unlike_after<optim::Adam>(zero, sharded, AdamOptions(0.01), AdamOptions(0.5)) == 0);
  CHECK(unlike_after<optim::SGD>(sharded, plain, SGDOptions(0.05).momentum(0.9), SGDOptions(0.5)) ==
        0);
}

TEST_CASE("a plain training goes on bit for bit, with files as Python writes them") {
  const TemporaryFolder folder;
  const auto options = AdamWOptions(0.01).weight_decay(0.1);
  const std::string path = folder.at("checkpoint");
  run_stretch<AdamW>({Under::kPlain, 1}, options, {0, 3, "", path});
  const Values resumed =
      run_stretch<AdamW>({Under::kPlain, 1}, AdamWOptions(0.5), {3, 5, path, ""}).front();
  const Values expected = train_alone<AdamW>(options, 5);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(resumed[i], expected[i]));

  const std::string text = packed_file(path + "/optimizer.json");
  for (const char* part :
       {R"("betas":[0.9,0.999])", R"("lr":0.01,)", R"("decoupled_weight_decay":true)",
        R"("first.weight":{"tensors":["step","exp_avg","exp_avg_sq"],"values":{}})"}) {
    INFO(part << " in " << text);
    CHECK(count_in(text, part) == 1);
  }
  CHECK(count_in(text, "frozen") == 1);  // in its group; it has no state
  CHECK(count_in(text, R"("values":{})") == 7);
  const std::string index = packed_file(path + "/optimizer.safetensors.index.json");
  CHECK(count_in(index, ".exp_avg\"") == 7);
  CHECK(count_in(index, "\"first.weight.step\"") == 1);
}

TEST_CASE("numbers and dtypes that files hold otherwise come back") {
  const auto sizes_and_steps = on_shm_ranks<std::string>(1, [](ThreadRank& rank) {
    const TemporaryFolder folder;
    const std::string path = folder.at("checkpoint");
    torch::nn::Linear net(4, 3);
    net->to(at::kBFloat16);
    net->weight.mutable_grad() = at::ones_like(net->weight);
    optim::AdamW wide(net->parameters(), AdamWOptions(0.01));
    wide.step();
    const auto state = [&](torch::optim::Optimizer& optimizer) -> auto& {
      return static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(net->weight.unsafeGetTensorImpl()));
    };
    constexpr int64_t kSteps = (int64_t{1} << 24) + 1;  // fp32 cannot say it
    state(wide).step(kSteps);
    const auto& all = rank.communicator;
    save_checkpoint(path, *net, {.optimizer = &wide, .communicator = all});
    AdamW narrow(net->parameters(), AdamWOptions(0.01));
    load_checkpoint(path, *net, {.optimizer = &narrow, .communicator = all});
    TORCH_CHECK(state(narrow).step() == kSteps, "got step ", state(narrow).step());
    TORCH_CHECK(state(narrow).exp_avg().scalar_type() == at::kBFloat16);
    save_checkpoint(path, *net, {.optimizer = &narrow, .communicator = all});
    optim::AdamW again(net->parameters(), AdamWOptions(0.01));
    load_checkpoint(path, *net, {.optimizer = &again, .communicator = all});
    TORCH_CHECK(state(again).exp_avg().scalar_type() == at::kFloat);
    TORCH_CHECK(at::equal(state(again).exp_avg(), state(narrow).exp_avg().to(at::kFloat)));
    // What is there is read into in place; what has no state in the checkpoint loses it.
    const at::Tensor held = state(again).exp_avg();
    held.zero_();
    net->bias.mutable_grad() = at::ones_like(net->bias);
    again.step();
    load_checkpoint(path, *net, {.optimizer = &again, .communicator = all});
    TORCH_CHECK(state(again).exp_avg().const_data_ptr() == held.const_data_ptr());
    TORCH_CHECK(held.sum().item<double>() != 0);
    TORCH_CHECK(again.state().size() == 1, "got ", again.state().size(), " states");
    return std::string("fine");
  });
  CHECK(sizes_and_steps.front() == "fine");
}

TEST_CASE("the state of another optimizer is refused, and nothing is changed") {
  std::vector<std::pair<std::string, std::string>> said;  // what was expected in which error
  double lr = 0;
  run_thread_ranks(
      1,
      [&](ThreadRank& rank) {
        Refusals refusals(rank);
        UnevenNet& net = refusals.net();
        const auto say = [&](const std::string& expected, const std::string& error) {
          said.emplace_back(expected, error);
        };
        torch::optim::LBFGS whole(net->parameters(), torch::optim::LBFGSOptions(0.1));
        say("LBFGS, expected Adam, AdamW, SGD", refusals.loading(whole));
        torch::optim::Adam coupled(net->parameters(), torch::optim::AdamOptions(0.1));
        say("'decoupled_weight_decay' of a parameter group as true", refusals.loading(coupled));
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
        say("a parameter group without 'momentum'", refusals.loading(sgd));
        AdamW foreign(UnevenNet()->parameters(), AdamWOptions(0.1));
        say("is no parameter of the module", refusals.loading(foreign));
        AdamW fewer(net->first->parameters(), AdamWOptions(0.1));
        say("without 'frozen' in group 0", refusals.loading(fewer));
        AdamW fine(net->parameters(), AdamWOptions(0.25));
        const auto change = [&](const std::string& expected, const std::string& before,
                                const std::string& after) {
          say(expected, refusals.loading_changed(fine, before, after));
        };
        const std::string tensors = R"("first.weight":{"tensors":[)";
        change("'maximize' of a parameter group as true", R"("maximize":false)",
               R"("maximize":true)");
        change("'rho' of a parameter group", R"("maximize":false)", R"("rho":0.5)");
        change("'lr' of a parameter group as \"high\"", R"("lr":0.01)", R"("lr":"high")");
        change("2 of the checkpoint", "],\"state\"", ",{\"params\":[]}],\"state\"");
        change("'first.weight.max_exp_avg_sq', which", R"("amsgrad":false)", R"("amsgrad":true)");
        change("optimizer state 'mu' of 'first.weight', which", tensors, tensors + "\"mu\",");
        change("optimizer state 'step' of 'first.weight' as -1", R"("exp_avg_sq"],"values":{})",
               R"("exp_avg_sq"],"values":{"step":-1})");
        change("optimizer.json in another form", R"("state":)", R"("other":)");
        change("optimizer.json in another form", R"("values":{})", R"("values":[1])");
        lr = static_cast<AdamWOptions&>(fine.param_groups()[0].options()).lr();
        TORCH_CHECK(fine.state().empty());
        change("no error", R"("maximize":false)", R"("foreach":true,"initial_lr":1,"name":"all")");
        save_checkpoint(refusals.path(), *net, {.communicator = rank.communicator});
        say("a checkpoint without an optimizer", refusals.loading(fine));
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(lr == 0.25);
  CHECK(said.size() == 16);
  for (const auto& [expected, error] : said) {
    INFO("expected '" << expected << "' in '" << error << "'");
    CHECK(error.find(expected) != std::string::npos);
  }
}

TEST_CASE("what one rank cannot save or load is raised on all ranks") {
  const TemporaryFolder folder;
  const auto errors = on_shm_ranks<std::string>(2, [&](ThreadRank& rank) {
    UnevenNet net, other;
    AdamW optimizer((rank.where.rank == 0 ? net : other)->parameters(), AdamWOptions(0.1));
    const SaveCheckpointOptions options{.optimizer = &optimizer, .communicator = rank.communicator};
    std::string errors = error_of([&] { save_checkpoint(folder.at("none"), *net, options); });
    ZeroRedundancyOptimizer<AdamW> flat(other, AdamWOptions(0.1), rank.communicator,
                                        {.placement = ShardPlacement::kFlat});
    errors += error_of([&] {
      save_checkpoint(folder.at("none"), *other,
                      {.optimizer = &flat, .communicator = rank.communicator});
    });
    return errors;
  });
  CHECK(errors[0].find("rank 1 could not go on") != std::string::npos);
  CHECK(errors[1].find("is no parameter of the module") != std::string::npos);
  for (const std::string& error : errors) CHECK(error.find("kFlat") != std::string::npos);
}

TEST_CASE("the archive of another rank's shards is refused by optimizers of trireme::optim") {
  std::vector<std::string> archives(2);
  std::string plain;
  const auto errors = on_shm_ranks<std::vector<std::string>>(2, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    optim::AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    fsdp_step(model, optimizer, 0, rank.where);
    const auto own = static_cast<size_t>(rank.where.rank);
    archives[own] = archive_with(optimizer);
    if (own == 0) {
      UnevenNet whole;
      plain = archive_with(optim::AdamW(whole->parameters(), AdamWOptions(0.01)));
    }
    rank.communicator->barrier("archives are there").wait();
    std::vector<std::string> said;
    for (const std::string& archive : {archives[own], archives[1 - own], plain})
      said.push_back(error_of([&] { load_archive(optimizer, archive); }));
    UnevenNet whole;
    optim::AdamW unsharded(whole->parameters(), AdamWOptions(0.01));
    said.push_back(error_of([&] { load_archive(unsharded, archives[own]); }));
    return said;
  });
  for (const size_t rank : {0U, 1U}) {
    CHECK(errors[rank][0] == "no error");
    const std::string own = "rank " + std::to_string(rank) + " of 2";
    const std::string other = "rank " + std::to_string(1 - rank) + " of 2";
    CHECK(errors[rank][1].find("the shards of " + other + ", expected that of the shards of " +
                               own) != std::string::npos);
    CHECK(errors[rank][2].find("whole parameters, expected") != std::string::npos);
    CHECK(errors[rank][3].find("expected that of whole parameters") != std::string::npos);
  }
}

}  // namespace trireme::optimizer_checkpoint_test
