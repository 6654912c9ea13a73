// The C++ door of checkpoints: plain and sharded modules, any number of ranks.

#include <trireme/saving/module_checkpoint.h>

#include <trireme/comm/launch/make_communicator.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/strategies/fsdp/fully_shard.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <catch_torch.h>
#include <comm/c10d/fake_engine.h>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::module_checkpoint_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::TemporaryFolder;
using trireme::test::ThreadRank;

namespace {

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
    for (const at::Tensor& tensor : {first->weight, first->bias, last->weight, last->bias, scale})
      tensor.copy_(at::arange(tensor.numel()).view(tensor.sizes()) + 100 * next++);
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

// What one of four ranks has: some rows, and some columns of these. What has no columns several
// ranks have, and only the lowest of them the right values.
CheckpointTensor quarter(const std::string& name, const at::Tensor& whole, int64_t number) {
  at::Tensor part = whole.detach();
  std::vector<int64_t> first(static_cast<size_t>(whole.dim()), 0);
  for (int64_t dim = 0; dim < std::min<int64_t>(whole.dim(), 2); ++dim) {
    const int64_t half = (whole.size(dim) + 1) / 2;
    const bool is_second = dim == 0 ? number >= 2 : number % 2 == 1;
    first[static_cast<size_t>(dim)] = is_second ? half : 0;
    part = part.narrow(dim, is_second ? half : 0, is_second ? whole.size(dim) - half : half);
  }
  const bool is_copy = whole.dim() == 0 ? number > 0 : whole.dim() == 1 && number % 2 == 1;
  return {name, whole.scalar_type(), whole.sizes().vec(), {is_copy ? part + 1 : part, first}};
}

}  // namespace

TEST_CASE("sharded modules save what plain ones load, at any number of ranks") {
  const TemporaryFolder folder;
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
            const std::string extra =
                load_checkpoint(path, *plain, {.communicator = rank.communicator});
            auto net = fully_shard(Net(60, rank.communicator),
                                   FsdpOptions{.communicator = rank.communicator});
            load_checkpoint(path, *net, {.communicator = rank.communicator});
            // Back into files: then they are what the sharded module has.
            const std::string again = folder.path + "/again";
            save_checkpoint(again, *net, {.communicator = rank.communicator});
            Net copy(70);
            load_checkpoint(again, *copy, {.communicator = rank.communicator});
            fine[static_cast<size_t>(rank.where.rank)] =
                static_cast<int>(holds(*plain, world) && holds(*copy, world) &&
                                 extra.find("\"world\": 1") != std::string::npos);
          },
          std::chrono::seconds(30), Engine::kShm);
      CHECK(fine == std::vector<int>(static_cast<size_t>(reading), 1));
    }
  }
}

TEST_CASE("modules load what ranks have saved in parts along two dimensions") {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/checkpoint", again = folder.path + "/again";
  std::vector<int> fine(4, 0);
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        const CheckpointRanks ranks{rank.communicator};
        const Net given(4);
        CheckpointContent content;
        for (const auto& items : {given->named_parameters(), given->named_buffers()})
          for (const auto& item : items)
            content.tensors["model"].push_back(quarter(item.key(), item.value(), rank.where.rank));
        save_checkpoint({path, content}, ranks);
        Net plain(50), copy(80);
        load_checkpoint(path, *plain, {.communicator = rank.communicator});
        auto net =
            fully_shard(Net(60, rank.communicator), FsdpOptions{.communicator = rank.communicator});
        load_checkpoint(path, *net, {.communicator = rank.communicator});
        save_checkpoint(again, *net, {.communicator = rank.communicator});
        load_checkpoint(again, *copy, {.communicator = rank.communicator});
        fine[static_cast<size_t>(rank.where.rank)] =
            static_cast<int>(holds(*plain, 4) && holds(*copy, 4));
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(fine == std::vector<int>(4, 1));
}

TEST_CASE("the checkpoint of another module is refused on all ranks") {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/checkpoint";
  std::vector<std::string> errors(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        save_checkpoint(path, *Net(1), {.communicator = rank.communicator});
        try {
          load_checkpoint(path, *torch::nn::Linear(4, 7), {.communicator = rank.communicator});
        } catch (const c10::ValueError& error) {
          errors[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& error : errors)
    CHECK(error.find("got a checkpoint without 'weight'") != std::string::npos);
}

TEST_CASE("over engines of GPUs alone ranks agree through the GPU") {
  const TemporaryFolder folder;
  const auto communicator = make_communicator(test::make_fake_group({}), nullptr);
  // This program has no libtorch_cuda, so that is as far as it gets.
  const std::string error = test::error_of([&] {
    save_checkpoint(folder.path + "/checkpoint", *Net(1), {.communicator = communicator});
  });
  CHECK(error.find("CUDA") != std::string::npos);
}

}  // namespace trireme::module_checkpoint_test
