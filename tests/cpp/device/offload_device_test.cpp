// What autograd saves leaves a device beside what that computes, and is back before it is needed.

#include <trireme/activation/checkpoint.h>
#include <trireme/activation/offload.h>

#include <catch_torch.h>
#include <device/sim_rows.h>
#include <temporary_folder.h>

namespace trireme::offload_device_test {

using namespace trireme::test;
using Catch::Contains;

namespace {

constexpr int64_t kNumel = 1 << 14;
constexpr int64_t kBytes = 4 * kNumel;  // the least that is offloaded

// Enqueued.
at::Tensor large(double value) {
  return at::full({kNumel}, value, at::TensorOptions().dtype(at::kFloat).pinned_memory(true))
      .to(sim_device(0), /*non_blocking=*/true);
}

CheckpointOptions offload_to(const std::string& folder) {
  CheckpointOptions options;
  options.offload = ActivationOffload{folder};
  return options;
}

struct NoPinnedMemory {
  NoPinnedMemory() { refuse_pinned(true); }
  ~NoPinnedMemory() { refuse_pinned(false); }
};

}  // namespace

TEST_CASE("a tensor leaves the device at once for its user, after what the device computes") {
  use_sim_device(sim_device(0));
  const auto packer = make_offload_packer({});
  HeldStream before(current_stream());
  at::Tensor tensor = large(1);
  const int64_t bytes = sim_bytes();
  const auto packed = packer->pack(tensor);
  tensor.reset();
  CHECK(sim_bytes() == bytes - kBytes);
  before.release();
  for (int time = 0; time < 3; ++time) {
    CHECK(are(packed->unpack(), 1));
    CHECK(sim_bytes() == bytes - kBytes);  // also where the graph is kept
  }
}

TEST_CASE("tensors that share memory share it again on the device") {
  use_sim_device(sim_device(0));
  const auto packer = make_offload_packer({});
  at::Tensor tensor = large(1);
  const auto one = packer->pack(tensor);
  const auto other = packer->pack(tensor.view({128, -1}).t());
  tensor.reset();
  const int64_t bytes = sim_bytes();
  for (int time = 0; time < 2; ++time) {
    const at::Tensor first = one->unpack();
    const at::Tensor second = other->unpack();
    CHECK(sim_bytes() == bytes + kBytes);
    CHECK(second.is_alias_of(first));
    CHECK(second.sizes() == at::IntArrayRef({128, 128}));
    CHECK(are(first, 1));
  }
  CHECK(sim_bytes() == bytes);
}

TEST_CASE("what was changed in place is noticed, since a copy may have come too late") {
  use_sim_device(sim_device(0));
  const at::Tensor tensor = large(1);
  const auto packed = make_offload_packer({})->pack(tensor);
  tensor.copy_(large(2));
  CHECK_THAT(error_of([&] { packed->unpack(); }), Contains("modified by an inplace operation"));
}

TEST_CASE("a backward brings back the layer before while it computes, if there is memory") {
  constexpr int64_t kWide = 64;
  const auto wide = [](const at::Tensor& v) {
    return v.unsqueeze(0).expand({kWide, kNumel}).exp().mean(0);
  };
  const auto narrow = [](const at::Tensor& v) { return v.exp(); };
  // Run alone, this is torch's engine, and ours takes its place with the first checkpoint.
  const at::Tensor on_cpu = at::full({kNumel}, 0.5, at::kFloat).requires_grad_();
  narrow(wide(on_cpu)).sum().backward();

  use_sim_device(sim_device(0));
  for (const bool has_memory : {true, false}) {
    CAPTURE(has_memory);
    const at::Tensor x = large(0.5).requires_grad_();
    const at::Tensor hidden = checkpoint(offload_to(""), wide, x);
    const at::Tensor loss = checkpoint(offload_to(""), narrow, hidden).sum();
    const int64_t bytes = sim_bytes();
    int64_t bytes_between = 0;
    hidden.register_hook([&](const at::Tensor& /*gradient*/) {
      bytes_between = sim_bytes();
      limit_sim_bytes(-1);
    });
    if (!has_memory) limit_sim_bytes(kWide * kBytes - 1);
    loss.backward();
    CHECK((bytes_between >= bytes + kWide * kBytes) == has_memory);
    CHECK(at::allclose(x.grad().cpu(), on_cpu.grad()));
    CHECK(offloaded_bytes().now == 0);
  }
}

TEST_CASE("a file takes what a device saves, by way of the host") {
  use_sim_device(sim_device(0));
  const TemporaryFolder folder;
  const auto packer = make_offload_packer({folder.path});
  at::Tensor tensor = large(1);
  const int64_t bytes = sim_bytes();
  const auto packed = packer->pack(tensor);
  tensor.reset();
  CHECK(sim_bytes() == bytes - kBytes);
  CHECK(are(packed->unpack(), 1));
  CHECK(are(packed->unpack(), 1));
}

TEST_CASE("pinned memory that is refused is an error, and a folder needs none") {
  use_sim_device(sim_device(0));
  const at::Tensor tensor = large(1);
  const NoPinnedMemory refused;
  CHECK_THAT(error_of([&] { make_offload_packer({})->pack(tensor); }),
             Contains("[checkpoint] got no pinned memory for 65536 bytes to offload: sim refuses "
                      "to lock pages") &&
                 Contains("Pass a folder"));
  const TemporaryFolder folder;
  CHECK(are(make_offload_packer({folder.path})->pack(tensor)->unpack(), 1));
}

}  // namespace trireme::offload_device_test
