// Compressed gradients of DDP: what goes over the wire, and that training resumes bit for bit.

#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <atomic>
#include <catch_torch.h>
#include <recording_communicator.h>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::compression_test {

using torch::nn::Linear;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::TemporaryFolder;
using trireme::test::ThreadRank;
using trireme::test::WireRecord;
using Model = DistributedDataParallel<Linear>;

namespace {

constexpr int64_t kWidth = 64;

Linear net() {
  const at::NoGradGuard no_grad;
  Linear made(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
  made->weight.copy_(at::sin(at::arange(kWidth * kWidth).view({kWidth, kWidth}).to(at::kFloat)));
  return made;
}

at::Tensor batch(int64_t step, int64_t rank) {
  return at::cos(at::arange(8 * kWidth).view({8, kWidth}).to(at::kFloat) *
                 static_cast<double>(step + 2 * rank + 1));
}

void backward(Model& model, int64_t step, int64_t rank) {
  model->zero_grad();
  model->forward(batch(step, rank)).square().mean().backward();
}

// Returns "verb of dtypes, bytes" of each verb of a step over two ranks that hold the same.
std::vector<std::string> wire_of(const Compression& compression) {
  const auto wire = std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  Model model(net(), wire, DdpOptions{.compression = compression});
  for (int64_t step = 0; step < 3; ++step) {
    wire->clear();
    backward(model, step, 0);
  }
  std::vector<std::string> verbs;
  for (const WireRecord& record : wire->records())
    verbs.push_back(record.verb + " " + record.dtypes.back() + " " + std::to_string(record.bytes));
  return verbs;
}

const std::string kMap = "all_reduce Float 8";

}  // namespace

TEST_CASE("a step sends codes, and then the map of used parameters") {
  using Verbs = std::vector<std::string>;
  constexpr auto kRanks = Between::kRanks;
  CHECK(wire_of(Fp16{.between = kRanks}) == Verbs{"all_gather Byte 8192", kMap});
  CHECK(wire_of(Bf16{.between = kRanks}) == Verbs{"all_gather Byte 8192", kMap});
  const int64_t int8 = 4096 + 16 * 4;
  CHECK(wire_of(Int8{.between = kRanks}) == Verbs{"all_gather Byte " + std::to_string(int8), kMap});
  const int64_t top = 41 * 8;
  CHECK(wire_of(TopK{.density = 0.01, .between = kRanks}) ==
        Verbs{"all_gather Byte " + std::to_string(top), kMap});
  CHECK(wire_of(RandomK{.density = 0.01, .between = kRanks}) ==
        Verbs{"all_reduce Float " + std::to_string(41 * 4), kMap});
  const std::string matrix = "all_reduce Float " + std::to_string(4 * 2 * kWidth);
  CHECK(wire_of(PowerSGD{.rank = 2, .start_step = 0, .between = kRanks}) ==
        Verbs{matrix, kMap, matrix});
  CHECK(wire_of(Sign{.dense_below = 5000, .between = kRanks}) ==
        Verbs{"all_gather Byte " + std::to_string(4 * 4096), kMap});
}

TEST_CASE("a run with compressed gradients resumes bit for bit") {
  const TemporaryFolder folder;
  for (const Compression& compression :
       {Compression(Int8{.rounding = Rounding::kStochastic, .between = Between::kRanks}),
        Compression(TopK{.density = 0.05, .between = Between::kRanks}),
        Compression(PowerSGD{.rank = 2, .start_step = 1, .between = Between::kRanks})}) {
    INFO(to_string(compression));
    std::atomic<int> equal{0};
    run_thread_ranks(2, [&](ThreadRank& rank) {
      Model first(net(), rank.communicator, DdpOptions{.compression = compression});
      for (int64_t step = 0; step < 3; ++step) backward(first, step, rank.where.rank);
      const SaveCheckpointOptions saving{.communicator = rank.communicator};
      save_checkpoint(folder.at("saved"), *first, saving);
      Model second(net(), rank.communicator, DdpOptions{.compression = compression});
      load_checkpoint(folder.at("saved"), *second, {.communicator = rank.communicator});
      for (int64_t step = 3; step < 5; ++step) {
        backward(first, step, rank.where.rank);
        backward(second, step, rank.where.rank);
        if (at::equal(first->module()->weight.grad(), second->module()->weight.grad())) ++equal;
      }
    });
    CHECK(equal == 4);
  }
}

TEST_CASE("ranks that compress in other ways are refused alike, and so are bad arguments") {
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const Compression mine = rank.where.rank == 0 ? Compression(Int8{}) : Compression(Sign{});
    bool is_refused = false;
    try {
      Model(net(), rank.communicator, DdpOptions{.compression = mine});
    } catch (const c10::ValueError& error) {
      is_refused = std::string(error.what()).find("Sign(") != std::string::npos;
    }
    TORCH_CHECK(is_refused);
  });
  CHECK_THROWS_AS(check(TopK{.density = 0}), c10::ValueError);
  CHECK_THROWS_AS(check(Int8{.block = 0}), c10::ValueError);
  CHECK_THROWS_AS(check(TopK{.chunk = 100}), c10::ValueError);
}

}  // namespace trireme::compression_test
