// Saves beside training, checksums, and numbered checkpoints, of C++ modules.

#include <trireme/saving/checkpoints.h>

#include <trireme/optim/write_gate.h>
#include <trireme/saving/module_checkpoint.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <catch_torch.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::checkpoints_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::run_thread_ranks;
using trireme::test::TemporaryFolder;
using trireme::test::ThreadRank;

namespace {

namespace fs = std::filesystem;
constexpr std::chrono::seconds kPatience{60};

// Some blocks of 1 MiB, so that steps meet a save on its way. The same on all ranks, which are
// threads with one random generator.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(6, 700), torch::nn::BatchNorm1d(700),
                            torch::nn::Linear(700, 900));
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters())
    parameter.copy_(at::arange(parameter.numel()).view(parameter.sizes()).remainder(13).mul(0.01));
  return net;
}

std::vector<at::Tensor> values_of(torch::nn::Sequential& net) {
  std::vector<at::Tensor> values;
  for (const auto& items : {net->named_parameters(), net->named_buffers()})
    for (const auto& item : items) values.push_back(item.value().detach().clone());
  return values;
}

bool is_equal(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  bool same = one.size() == other.size();
  for (size_t i = 0; same && i < one.size(); ++i) same = at::equal(one[i], other[i]);
  return same;
}

void run_backward(torch::nn::Sequential& net) {
  net->zero_grad();
  net->forward(at::ones({4, 6})).square().sum().backward();
}

void flip_last_byte(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(byte);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a save beside training is one of the moment of its call, on any number of ranks") {
  const TemporaryFolder folder;
  for (const int64_t world : {1, 2}) {
    std::vector<int> fine(static_cast<size_t>(world), 0);
    run_thread_ranks(
        world,
        [&](ThreadRank& rank) {
          auto net = make_net();
          torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
          SaveCheckpointOptions options;
          options.optimizer = &optimizer;
          options.communicator = rank.communicator;
          options.asynchronous = true;
          std::vector<std::vector<at::Tensor>> expected;
          std::vector<PendingSave> saves;
          for (int64_t step = 0; step < 3; ++step) {
            run_backward(net);
            trireme::step(optimizer);
            expected.push_back(values_of(net));
            const std::string path = folder.at(std::to_string(world) + std::to_string(step));
            saves.push_back(save_checkpoint(path, *net, options));
          }
          run_backward(net);
          trireme::step(optimizer);
          bool same = true;
          for (size_t step = 0; step < saves.size(); ++step) {
            saves[step].wait();
            same = same && saves[step].done() && saves[step].stall_ms() > 0 &&
                   saves[step].written_bytes() > 0;
            auto other = make_net();
            load_checkpoint(saves[step].path(), *other, {.communicator = rank.communicator});
            same = same && is_equal(values_of(other), expected[step]);
          }
          fine[static_cast<size_t>(rank.where.rank)] = static_cast<int>(same);
        },
        kPatience, Engine::kShm);
    CHECK(fine == std::vector<int>(static_cast<size_t>(world), 1));
  }
}

TEST_CASE("a step that tells nobody fails the save, and the one before stays") {
  const TemporaryFolder folder;
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  std::string error = "no error";
  run_thread_ranks(
      1,
      [&](ThreadRank& rank) {
        SaveCheckpointOptions options;
        options.communicator = rank.communicator;
        options.asynchronous = true;
        for (int tries = 0; tries < 50 && error == "no error"; ++tries) {
          run_backward(net);
          const PendingSave save = save_checkpoint(folder.at("ck"), *net, options);
          optimizer.step();
          error = error_of([&] { save.wait(); });
        }
      },
      kPatience, Engine::kShm);
  CHECK(has(error, "was written while it was being saved"));
}

TEST_CASE("an error is thrown by wait, by the next save, and on all ranks") {
  const TemporaryFolder folder;
  std::ofstream(folder.at("file")) << "mine";
  std::vector<std::string> errors(2), later(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        auto net = make_net();
        SaveCheckpointOptions options;
        options.communicator = rank.communicator;
        options.asynchronous = true;
        const auto number = static_cast<size_t>(rank.where.rank);
        const PendingSave first = save_checkpoint(folder.at("file"), *net, options);
        errors[number] = error_of([&] { first.wait(); });
        save_checkpoint(folder.at("file"), *net, options);
        later[number] = error_of([&] { save_checkpoint(folder.at("ck"), *net, options); });
        save_checkpoint(folder.at("ck"), *net, options).wait();
      },
      kPatience, Engine::kShm);
  for (const auto* texts : {&errors, &later}) {
    CHECK(has(texts->at(0), "found a file"));
    CHECK(has(texts->at(1), "rank 0 could not go on"));
  }
}

TEST_CASE("a byte that was turned over is found on all ranks before anything is changed") {
  const TemporaryFolder folder;
  std::vector<std::string> errors(2);
  std::vector<int> fine(2, 0);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        auto net = make_net();
        LoadCheckpointOptions options;
        options.communicator = rank.communicator;
        save_checkpoint(folder.at("ck"), *net, {.communicator = rank.communicator});
        if (rank.where.rank == 0)
          flip_last_byte(folder.at("ck") + "/model-00001-of-00001.safetensors");
        rank.communicator->barrier("damage").wait();
        for (at::Tensor& parameter : net->parameters()) parameter.set_data(parameter.detach() + 1);
        const auto before = values_of(net);
        const auto number = static_cast<size_t>(rank.where.rank);
        errors[number] = error_of([&] { load_checkpoint(folder.at("ck"), *net, options); });
        fine[number] = static_cast<int>(is_equal(values_of(net), before));
        options.verify = false;
        load_checkpoint(folder.at("ck"), *net, options);
      },
      kPatience, Engine::kShm);
  for (const std::string& error : errors) CHECK(has(error, "than were saved"));
  CHECK(fine == std::vector<int>{1, 1});
}

TEST_CASE("a run goes on at its newest whole checkpoint, random numbers included") {
  const TemporaryFolder folder;
  std::vector<std::string> told(2);
  std::vector<int> fine(2, 0);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        auto net = make_net();
        torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
        GlobalBatch batches({.rows = 10, .size = 4, .communicator = rank.communicator});
        CheckpointsOptions options;
        options.every = 2;
        options.batches = &batches;
        options.communicator = rank.communicator;
        std::vector<at::Tensor> expected;
        {
          Checkpoints saves(folder.at("run"), *net, &optimizer, options);
          bool good = !saves.load_latest();
          for (int64_t step = 0; step < 7; ++step) {
            batches.part(step);
            run_backward(net);
            trireme::step(optimizer);
            if (step == 3) expected = values_of(net);
            good = good && saves.step(step + 1, R"({"done": 1})").has_value() == (step % 2 == 1);
          }
          saves.wait();
          fine[static_cast<size_t>(rank.where.rank)] = static_cast<int>(good);
        }
        rank.communicator->barrier("saved").wait();
        if (rank.where.rank == 0)
          flip_last_byte(folder.at("run") +
                         "/step-0000000006/optimizer-00001-of-00001.safetensors");
        rank.communicator->barrier("damage").wait();
        Checkpoints saves(folder.at("run"), *net, &optimizer, options);
        const auto start = saves.load_latest();
        const bool good = start && start->step == 4 && start->extra == R"({"done":1})" &&
                          start->warnings.size() == 1 && batches.next_step() == 4 &&
                          is_equal(values_of(net), expected);
        if (!good) fine[static_cast<size_t>(rank.where.rank)] = 0;
        if (start) told[static_cast<size_t>(rank.where.rank)] = start->warnings.front();
      },
      kPatience, Engine::kShm);
  CHECK(fine == std::vector<int>{1, 1});
  for (const std::string& text : told) CHECK(has(text, "step-0000000006"));
  CHECK(fs::exists(folder.at("run") + "/step-0000000004"));
}

TEST_CASE("an error of a numbered save is thrown once, and the run goes back") {
  const TemporaryFolder folder;
  std::vector<std::string> errors;
  std::vector<int64_t> loaded;
  run_thread_ranks(
      1,
      [&](ThreadRank& rank) {
        auto net = make_net();
        Checkpoints saves(folder.at("run"), *net, nullptr,
                          {.every = 1, .communicator = rank.communicator});
        saves.save(1);
        saves.wait();
        std::ofstream(folder.at("run") + "/step-0000000002") << "in the way";
        for (const bool waits : {true, false}) {
          saves.save(2);
          errors.push_back(error_of([&] { waits ? saves.wait() : void(saves.save(3)); }));
          loaded.push_back(saves.load_latest().value().step);
        }
      },
      kPatience, Engine::kShm);
  for (const std::string& error : errors) CHECK(has(error, "found a file"));
  CHECK(loaded == std::vector<int64_t>{1, 1});
}

TEST_CASE("what are no numbered checkpoints is refused") {
  const TemporaryFolder folder;
  std::ofstream(folder.at("file")) << "mine";
  std::vector<std::string> errors;
  run_thread_ranks(
      1,
      [&](ThreadRank& rank) {
        auto net = make_net();
        CheckpointsOptions options;
        options.communicator = rank.communicator;
        const auto error_for = [&](const std::string& path, int64_t every, int64_t keep) {
          options.every = every;
          options.keep = keep;
          return error_of([&] { Checkpoints(path, *net, nullptr, options); });
        };
        errors = {error_for(folder.at("run"), 0, 1), error_for(folder.at("run"), 1, 0),
                  error_for(folder.at("file"), 1, 1), error_for("", 1, 1)};
        const Checkpoints first(folder.at("run"), *net, nullptr,
                                {.every = 1, .communicator = rank.communicator});
        errors.push_back(error_for(folder.at("run"), 1, 1));
      },
      kPatience, Engine::kShm);
  CHECK(has(errors.at(0), "got every=0"));
  CHECK(has(errors.at(1), "got keep=0"));
  CHECK(has(errors.at(2), "which is no folder"));
  CHECK(has(errors.at(3), "got an empty path"));
  CHECK(has(errors.at(4), "got a second Checkpoints"));
}

}  // namespace trireme::checkpoints_test
