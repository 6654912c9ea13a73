// What a communicator does over engines of GPUs, on machines that have none.

#include <trireme/comm/launch/make_communicator.h>
#include <trireme/comm/subgroups.h>

#include <catch_torch.h>
#include <comm/c10d/fake_engine.h>
#include <recording_communicator.h>

namespace trireme::gpu_engines_test {

using trireme::test::FakeEngine;
using trireme::test::FakeEngines;
using trireme::test::make_fake_group;
using trireme::test::RecordingCommunicator;

namespace {

std::shared_ptr<Communicator> communicator_over(const FakeEngines& engines) {
  return make_communicator(make_fake_group(engines), nullptr);
}

FakeEngines of_cpu_and_gpu() { return {.cpu = c10::make_intrusive<FakeEngine>("fake")}; }
FakeEngines of_gpu() { return {}; }

}  // namespace

TEST_CASE("a barrier goes over the CPU's engine, where there is one") {
  const FakeEngines engines = of_cpu_and_gpu();
  communicator_over(engines)->barrier("a step").wait();
  CHECK(engines.cpu->barriers == 1);
  CHECK(engines.cuda->barriers == 0);
  // In slices, between which it is seen what peers announce.
  CHECK(engines.cpu->work->waits.at(0) < std::chrono::minutes(1));
}

TEST_CASE("a barrier of GPUs has no limit of ours, since NCCL ends its group when a wait is over") {
  const FakeEngines engines = of_gpu();
  communicator_over(engines)->barrier("a step").wait();
  CHECK(engines.cuda->barriers == 1);
  CHECK(engines.cuda->work->waits == std::vector<std::chrono::milliseconds>{kNoTimeout});
}

TEST_CASE("texts go over the CPU, or over the one GPU that a group takes tensors of") {
  CHECK(communicator_over(of_cpu_and_gpu())->device() == c10::Device(c10::kCPU));
  CHECK(communicator_over(of_gpu())->device() == c10::Device(c10::kCUDA, 1));
  CHECK(RecordingCommunicator(RankOf{0, 2}).device() == c10::Device(c10::kCPU));
}

TEST_CASE("a part gets options of its own, also below a part") {
  const FakeEngines engines = of_cpu_and_gpu();
  const auto communicator = communicator_over(engines);
  const auto twin = duplicate(*communicator);
  REQUIRE(twin);
  CHECK(duplicate(*twin));
  for (const auto& engine : {engines.cpu, engines.cuda})
    CHECK(engine->options->global_ranks_in_group.empty());
}

}  // namespace trireme::gpu_engines_test
