// Collectives of the user's: how lists of tensors are laid out for them, and what is refused. The
// user's are played by functions that do what a group would in which all ranks have the same.

#include <trireme/comm/c10d/custom_communicator.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <chrono>
#include <memory>
#include <recording_communicator.h>
#include <utility>

namespace trireme::custom_communicator_test {

using trireme::test::error_of;
using trireme::test::RecordingCommunicator;

namespace {

constexpr int64_t kWorld = 3;
constexpr int64_t kRank = 1;

struct Custom {
  CustomCollective collective() {
    return {[this](int64_t numel, at::ScalarType dtype, c10::Device device) {
              allocated.push_back(numel);
              return at::zeros({numel + spoils}, at::TensorOptions().dtype(dtype).device(device));
            },
            [this](const at::Tensor& output, const at::Tensor& input) {
              seen = input.clone();
              is_in_place = output.is_alias_of(input);
              if (output.numel() > input.numel()) {
                output.view({kWorld, -1}).copy_(input.clone().view({1, -1}));
              } else {
                output.copy_(input.view({kWorld, -1})[kRank]).mul_(kWorld);
              }
              return std::shared_ptr<c10d::Work>();
            }};
  }

  std::shared_ptr<RecordingCommunicator> inner =
      std::make_shared<RecordingCommunicator>(RankOf{kRank, kWorld});
  CustomCommunicator communicator{inner};
  int64_t spoils = 0;
  std::vector<int64_t> allocated;
  at::Tensor seen;
  bool is_in_place = false;
};

// Ends when a wait for it has just been given up.
struct LateWork final : c10d::Work {
  bool wait(std::chrono::milliseconds) override {
    if (isCompleted()) return true;
    finish();
    TORCH_CHECK(false, "Operation timed out!");
  }
};

using Sizes = std::vector<int64_t>;

at::Tensor floats(int64_t numel, float value) { return at::full({numel}, value); }

}  // namespace

TEST_CASE("without a collective of the user's all verbs are inner's") {
  Custom custom;
  at::Tensor whole = at::zeros({kWorld * 2});
  custom.communicator.all_gather({whole}, {floats(2, 5)}, "gathered").wait();
  custom.communicator.all_reduce({whole}, ReduceOp::kSum, "summed").wait();
  CHECK(custom.inner->records().size() == 2);
  CHECK(custom.communicator.rank() == kRank);
  CHECK(plain_of(custom.inner) == custom.inner);
}

TEST_CASE("a list is gathered by one call, laid end to end by rank, and copied out") {
  Custom custom;
  custom.communicator.set_all_gather(custom.collective());
  at::Tensor first = at::zeros({kWorld * 2});
  at::Tensor second = at::zeros({kWorld * 3});
  Pending pending = custom.communicator.all_gather({first, second}, {floats(2, 5), floats(3, 7)},
                                                   "unit 0.weight");
  CHECK(custom.allocated == Sizes{kWorld * 5});
  CHECK(custom.is_in_place);
  CHECK(custom.seen.equal(at::tensor({5.0F, 5.0F, 7.0F, 7.0F, 7.0F})));
  CHECK(first.eq(0).all().item<bool>());  // not before it is waited for
  pending.wait();
  CHECK(first.eq(5).all().item<bool>());
  CHECK(second.eq(7).all().item<bool>());
  CHECK(custom.inner->records().empty());
  custom.communicator.set_all_gather({});
  custom.communicator.all_gather({first}, {floats(2, 1)}, "gathered").wait();
  CHECK(custom.inner->records().size() == 1);
}

TEST_CASE("of several dtypes bytes are gathered") {
  Custom custom;
  custom.communicator.set_all_gather(custom.collective());
  at::Tensor whole = at::zeros({kWorld});
  at::Tensor wide = at::zeros({kWorld * 2}, at::kDouble);
  custom.communicator
      .all_gather({whole, wide}, {floats(1, 5), floats(2, 7).to(at::kDouble)}, "unit")
      .wait();
  CHECK(custom.seen.scalar_type() == at::kByte);
  CHECK(custom.allocated == Sizes{kWorld * (4 + 16)});
  CHECK(whole.eq(5).all().item<bool>());
  CHECK(wide.eq(7).all().item<bool>());
}

TEST_CASE("sums are scattered from memory of the user's into memory of the user's") {
  Custom custom;
  custom.communicator.set_reduce_scatter(custom.collective());
  at::Tensor sums = at::zeros({2});
  const at::Tensor gradients = at::arange(6).to(at::kFloat);
  custom.communicator.reduce_scatter({sums}, {gradients}, ReduceOp::kSum, "bucket 0").wait();
  CHECK(custom.allocated == Sizes{6, 2});
  CHECK_FALSE(custom.is_in_place);
  CHECK(sums.equal(at::tensor({6.0F, 9.0F})));
  custom.communicator.reduce_scatter({sums}, {gradients}, ReduceOp::kMax, "largest").wait();
  CHECK(custom.inner->records().size() == 1);
}

TEST_CASE("a Work that ends just when a look at the others is due has not failed") {
  Custom custom;
  CustomCollective collective = custom.collective();
  collective.start = [start = collective.start](const at::Tensor& output, const at::Tensor& input) {
    start(output, input);
    const auto work = c10::make_intrusive<LateWork>();
    return std::shared_ptr<c10d::Work>(work.get(), [work](c10d::Work*) {});
  };
  custom.communicator.set_all_gather(collective);
  at::Tensor whole = at::zeros({kWorld * 2});
  custom.communicator.all_gather({whole}, {floats(2, 5)}, "unit").wait();
  CHECK(whole.eq(5).all().item<bool>());
}

TEST_CASE("memory that does not fit is refused, with what was expected") {
  Custom custom;
  custom.communicator.set_all_gather(custom.collective());
  custom.spoils = 1;
  at::Tensor whole = at::zeros({kWorld * 2});
  const std::string said = error_of<c10::ValueError>(
      [&] { custom.communicator.all_gather({whole}, {floats(2, 5)}, "unit"); });
  CHECK_THAT(said, Catch::Contains("[comm] got 7 elements of Float on cpu from allocate() of a "
                                   "custom collective, expected 6 of Float on cpu, contiguous "
                                   "(rank 1 of 3). Return torch.empty"));
}

}  // namespace trireme::custom_communicator_test
