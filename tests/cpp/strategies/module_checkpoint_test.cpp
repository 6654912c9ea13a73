// The C++ door of checkpoints: plain and sharded modules, any number of ranks.

#include <trireme/strategies/fsdp/module_checkpoint.h>

#include <trireme/strategies/fsdp/fully_shard.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <catch_torch.h>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread_ranks.h>
#include <vector>

using namespace trireme;
using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

struct Folder {
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "trireme_XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// Rows that no number of ranks divides, a scalar, a shared weight, buffers. Plain, or a unit with
// one in it.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t number, const std::shared_ptr<Communicator>& sharded_over = nullptr) {
    torch::nn::Linear first(4, 7);
    last = register_module("last", torch::nn::Linear(7, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    scale = register_parameter("scale", at::full({}, 1.5));
    int64_t next = number;
    const at::NoGradGuard no_grad;
    for (const at::Tensor& one : {first->weight, first->bias, last->weight, last->bias, scale})
      one.copy_(at::arange(one.numel()).view(one.sizes()) + 100 * next++);
    norm->running_mean.fill_(number);
    if (sharded_over) {
      register_module("first", fully_shard(first, FsdpOptions{.communicator = sharded_over}));
    } else {
      register_module("first", first);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  torch::nn::Linear last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

// Whether a plain module has exactly these values.
bool holds(const NetImpl& net, int64_t number) {
  const Net expected(number);
  const auto got = net.named_parameters();
  bool same = net.norm->running_mean.eq(number).all().item<bool>();
  for (const auto& item : expected->named_parameters())
    same = same && at::equal(got[item.key()], item.value());
  return same;
}

}  // namespace

TEST_CASE("sharded modules save what plain ones load, at any number of ranks") {
  const Folder folder;
  const std::string path = folder.path + "/checkpoint";
  for (const int64_t world : {1, 2, 3}) {
    run_thread_ranks(
        world,
        [&](ThreadRank& rank) {
          auto net = fully_shard(Net(world, rank.communicator),
                                 FsdpOptions{.communicator = rank.communicator});
          save_checkpoint(path, *net,
                          {.extra = R"({"world": 1})",
                           .max_file_bytes = 100,
                           .communicator = rank.communicator});
        },
        std::chrono::seconds(30), Engine::kShm);
    for (const int64_t reading : {1, 3}) {
      std::vector<int> fine(static_cast<size_t>(reading), 0);
      run_thread_ranks(
          reading,
          [&](ThreadRank& rank) {
            Net plain(50);
            const std::string extra = load_checkpoint(path, *plain, rank.communicator);
            auto net = fully_shard(Net(60, rank.communicator),
                                   FsdpOptions{.communicator = rank.communicator});
            load_checkpoint(path, *net, rank.communicator);
            // Back into files: then they are what the sharded module has.
            const std::string again = folder.path + "/again";
            save_checkpoint(again, *net, {.communicator = rank.communicator});
            Net copy(70);
            load_checkpoint(again, *copy, rank.communicator);
            fine[static_cast<size_t>(rank.where.rank)] =
                static_cast<int>(holds(*plain, world) && holds(*copy, world) &&
                                 extra.find("\"world\": 1") != std::string::npos);
          },
          std::chrono::seconds(30), Engine::kShm);
      CHECK(fine == std::vector<int>(static_cast<size_t>(reading), 1));
    }
  }
}

TEST_CASE("the checkpoint of another module is refused on all ranks") {
  const Folder folder;
  const std::string path = folder.path + "/checkpoint";
  std::vector<std::string> errors(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        save_checkpoint(path, *Net(1), {.communicator = rank.communicator});
        try {
          load_checkpoint(path, *torch::nn::Linear(4, 7), rank.communicator);
        } catch (const c10::ValueError& error) {
          errors[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& error : errors)
    CHECK(error.find("got a checkpoint without 'weight'") != std::string::npos);
}
