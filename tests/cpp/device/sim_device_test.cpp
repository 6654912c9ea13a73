// The sim device itself: it trains as the CPU does, and what CUDA would punish is seen.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <catch_torch.h>
#include <device/sim_engine.h>
#include <device/sim_rows.h>
#include <future>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::sim_device_test {

using namespace trireme::test;

namespace {

c10::Stream other_stream() {
  return c10::impl::VirtualGuardImpl(kSim).getStreamFromGlobalPool(sim_device(0), false);
}

}  // namespace

TEST_CASE("a net on the sim device trains as on the CPU") {
  use_sim_device(sim_device(0));
  const std::vector<at::Tensor> expected =
      train_alone<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01), 4);
  UnevenNet net;
  move_to(*net, sim_device(0));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    net->forward(whole_batch(step).to(sim_device(0)), step % 2 == 0).backward();
    optimizer.step();
  }
  CHECK(count_unlike(values_of(net->parameters()), expected, 1e-6) == 0);
}

TEST_CASE("who reads from another stream without an event is too early") {
  use_sim_device(sim_device(0));
  const c10::Stream other = other_stream();
  c10::Event event(kSim);
  HeldStream held(current_stream());
  const at::Tensor written = to_sim(pinned(1));
  event.record(current_sim_stream(sim_device(0)));
  const c10::StreamGuard guard(other);
  CHECK_FALSE(are(written, 1));
  event.block(other);
  held.release();
  CHECK(are(written, 1));
}

TEST_CASE("memory goes in the order of its stream, unless another one is recorded") {
  use_sim_device(sim_device(0));
  const c10::Stream other = other_stream();
  for (const bool is_recorded : {false, true}) {
    CAPTURE(is_recorded);
    at::Tensor freed = to_sim(pinned(1));
    const at::Tensor copy = at::zeros({4}, sim_device(0));
    synchronize(sim_device(0));
    HeldStream held(sim_stream(other));
    {
      const c10::StreamGuard guard(other);
      copy.copy_(freed);
    }
    if (is_recorded) freed.record_stream(other);
    freed.reset();
    if (!is_recorded) current_stream().wait(current_stream().last());
    held.release();
    synchronize(sim_device(0));
    CHECK(are(copy, 1) == is_recorded);
  }
}

TEST_CASE("pinned memory is read and written when its turn comes") {
  use_sim_device(sim_device(0));
  const at::Tensor sent = pinned(1);
  const at::Tensor received = pinned(0);
  CHECK(sent.is_pinned());
  const at::Tensor ones = to_sim(pinned(1));
  HeldStream held(current_stream());
  const at::Tensor copy = to_sim(sent);
  sent.zero_();
  received.copy_(ones, /*non_blocking=*/true);
  CHECK_FALSE(are(received, 1));
  held.release();
  CHECK_FALSE(are(copy, 1));
  CHECK(are(received, 1));
}

TEST_CASE("collectives do not wait for each other's caller; his stream waits if asked") {
  std::promise<void> was_read;
  const auto found = on_sim_ranks<std::vector<float>>(2, [&](ThreadRank& rank) {
    const c10::Device device = sim_device(rank.where.rank);
    std::vector<at::Tensor> sums{at::full({2}, 1.0F + static_cast<float>(rank.where.rank), device)};
    if (rank.where.rank == 1) was_read.get_future().wait();
    const auto work = rank.group->allreduce(sums);
    const float early = sums[0].cpu()[0].item<float>();
    if (rank.where.rank == 0) was_read.set_value();
    work->wait();
    return std::vector<float>{early, sums[0].cpu()[0].item<float>()};
  });
  CHECK(found[0] == std::vector<float>{1, 3});
  CHECK(found[1][1] == 3);
}

}  // namespace trireme::sim_device_test
