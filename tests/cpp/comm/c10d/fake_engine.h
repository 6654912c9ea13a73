#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace trireme::test {

// Finished at once; notes how long it was waited for at most.
class FakeWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    waits.push_back(timeout);
    return true;
  }
  std::vector<std::chrono::milliseconds> waits;
};

// An engine of one rank that moves nothing. Its parts note in the options that they were split by
// what NCCL and Gloo do.
class FakeEngine final : public c10d::Backend {
 public:
  explicit FakeEngine(c10::intrusive_ptr<Options> given)
      : Backend(0, 1), options(std::move(given)) {}
  explicit FakeEngine(const char* name) : FakeEngine(c10::make_intrusive<Options>(name)) {}

  const std::string getBackendName() const override { return options->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>&,
                                    const c10::intrusive_ptr<Options>& of_part) override {
    of_part->global_ranks_in_group = {7};
    return c10::make_intrusive<FakeEngine>(of_part);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    ++barriers;
    return work;
  }

  c10::intrusive_ptr<Options> options;
  c10::intrusive_ptr<FakeWork> work = c10::make_intrusive<FakeWork>();
  int barriers = 0;
};

// A group that chooses its engine as torch's does, but makes no CUDA tensor for that.
class FakeGroup final : public c10d::ProcessGroup {
 public:
  FakeGroup() : ProcessGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1) {}
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    if (options.device) return ProcessGroup::barrier(options);
    return getDefaultBackend()->barrier(options);
  }
};

struct FakeEngines {
  c10::intrusive_ptr<FakeEngine> cpu = {};
  c10::intrusive_ptr<FakeEngine> cuda = c10::make_intrusive<FakeEngine>("nccl");
};

// Makes a group like "cpu:fake,cuda:nccl", or, without one for the CPU, like "nccl" bound to GPU 1.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_fake_group(const FakeEngines& engines) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<FakeGroup>();
  group->setBoundDeviceId(c10::Device(c10::kCUDA, 1));
  if (engines.cpu) group->setBackend(c10::kCPU, Type::CUSTOM, engines.cpu);
  group->setBackend(c10::kCUDA, Type::NCCL, engines.cuda);
  group->setDefaultBackend(Type::NCCL);
  return group;
}

}  // namespace trireme::test
