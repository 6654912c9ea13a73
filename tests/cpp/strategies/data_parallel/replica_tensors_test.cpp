#include <trireme/strategies/data_parallel/replica_tensors.h>

#include <ATen/core/grad_mode.h>

#include <catch_torch.h>
#include <vector>

namespace trireme::replica_tensors_test {

namespace {

// A module of two parameters, one of them frozen, and a buffer, and replicas that hold nothing yet.
ModuleReplicas some_module(size_t replicas) {
  ModuleReplicas module;
  module.devices.assign(replicas, c10::Device(c10::kCPU));
  module.names = {"weight", "frozen"};
  module.parameters = {at::ones({3, 2}).requires_grad_(true), at::full({2}, 5.0)};
  module.buffers = {at::zeros({4}, at::kLong)};
  for (size_t replica = 0; replica < replicas; ++replica) {
    module.leaves.push_back({at::empty({0}).requires_grad_(true), at::empty({0})});
    module.replica_buffers.push_back({at::empty({0}, at::kLong)});
  }
  return module;
}

constexpr int64_t kParameterBytes = (6 + 2) * 4;
constexpr int64_t kBufferBytes = 4 * 8;

// How many of the replicas' tensors differ from the module's.
int64_t count_unlike(const ModuleReplicas& module) {
  int64_t unlike = 0;
  for (size_t replica = 0; replica < module.devices.size(); ++replica) {
    for (size_t i = 0; i < module.parameters.size(); ++i) {
      const at::Tensor& leaf = module.leaves[replica][i];
      unlike += !at::equal(leaf, module.parameters[i]) || !leaf.is_leaf() ||
                leaf.scalar_type() != module.parameters[i].scalar_type() ||
                leaf.requires_grad() != module.parameters[i].requires_grad();
    }
    for (size_t i = 0; i < module.buffers.size(); ++i)
      unlike += !at::equal(module.replica_buffers[replica][i], module.buffers[i]);
  }
  return unlike;
}

// Writes like an optimizer that steps.
void write(at::Tensor parameter, double value) {
  const at::NoGradGuard no_grad;
  parameter.fill_(value);
}

}  // namespace

TEST_CASE("leaves of the master's device are its memory and cost nothing") {
  ReplicaTensors tensors(some_module(3));
  const ModuleReplicas& module = tensors.module();
  CHECK(count_unlike(module) == 0);
  for (size_t replica = 0; replica < 3; ++replica) {
    for (size_t i = 0; i < 2; ++i)
      CHECK(module.leaves[replica][i].data_ptr() == module.parameters[i].data_ptr());
    CHECK(tensors.own_bytes(replica) == (replica == 0 ? 0 : kBufferBytes));
  }
  write(module.parameters[0], 7);
  CHECK(tensors.refresh() == 0);
  CHECK(count_unlike(module) == 0);
}

TEST_CASE("each leaf has a gradient of its own") {
  const ReplicaTensors tensors(some_module(2));
  const ModuleReplicas& module = tensors.module();
  (module.leaves[0][0] * 2).sum().backward();
  (module.leaves[1][0] * 3).sum().backward();
  CHECK_FALSE(module.parameters[0].grad().defined());
  CHECK(module.leaves[0][0].grad()[0][0].item<double>() == 2);
  CHECK(module.leaves[1][0].grad()[0][0].item<double>() == 3);
}

TEST_CASE("a graph of a leaf notices that the master was written") {
  const ReplicaTensors tensors(some_module(2));
  const ModuleReplicas& module = tensors.module();
  for (const size_t replica : {0, 1}) {
    const at::Tensor loss = module.leaves[replica][0].square().sum();
    write(module.parameters[0], 4);
    CHECK_THROWS_WITH(loss.backward(), Catch::Contains("modified by an inplace operation"));
  }
}

TEST_CASE("replica 0 writes the master's buffers, the others copies") {
  ReplicaTensors tensors(some_module(2));
  const ModuleReplicas& module = tensors.module();
  at::Tensor(module.replica_buffers[0][0]).add_(1);
  at::Tensor(module.replica_buffers[1][0]).add_(5);
  CHECK(module.buffers[0][0].item<int64_t>() == 1);
  CHECK(tensors.refresh() == kBufferBytes);
  CHECK(count_unlike(module) == 0);
  CHECK(tensors.refresh() == 0);
}

TEST_CASE("leaves follow a master that was given other memory, a dtype, or frozen") {
  for (const bool copy_always : {false, true}) {
    CAPTURE(copy_always);
    ReplicaTensors tensors(some_module(2), copy_always);
    const ModuleReplicas& module = tensors.module();
    at::Tensor weight = module.parameters[0];
    weight.set_data(at::full({3, 2}, 9.0));  // no version tells of it
    static_cast<void>(tensors.refresh());
    CHECK(count_unlike(module) == 0);
    const at::Tensor twelve = at::arange(12, at::kFloat).view({6, 2});
    for (const int64_t begin : {0, 3}) {
      weight.set_data(twelve.narrow(0, begin, 3));
      static_cast<void>(tensors.refresh());
      CHECK(count_unlike(module) == 0);
    }
    at::Tensor(module.buffers[0]).set_data(at::full({4}, 6, at::kLong));
    static_cast<void>(tensors.refresh());
    CHECK(count_unlike(module) == 0);
    weight.set_data(at::full({3, 2}, 8.0, at::kDouble));
    static_cast<void>(tensors.refresh());
    CHECK(count_unlike(module) == 0);
    weight.set_requires_grad(false);
    at::Tensor(module.parameters[1]).set_requires_grad(true);
    static_cast<void>(tensors.refresh());
    CHECK(count_unlike(module) == 0);
    CHECK(tensors.refresh() == 0);
  }
}

TEST_CASE("copies are made when the master, or the copy, was written, and then only") {
  ReplicaTensors tensors(some_module(2), /*copy_always=*/true);
  const ModuleReplicas& module = tensors.module();
  CHECK(count_unlike(module) == 0);
  CHECK(tensors.own_bytes(0) == kParameterBytes);
  CHECK(tensors.own_bytes(1) == kParameterBytes + kBufferBytes);
  CHECK(tensors.refresh() == 0);
  write(module.parameters[0], 3);
  CHECK(tensors.refresh() == 2 * 6 * 4);
  CHECK(tensors.refresh() == 0);
  write(module.leaves[1][1], 3);
  CHECK(tensors.refresh() == 2 * 4);
  CHECK(count_unlike(module) == 0);
}

TEST_CASE("copies that came with the master's memory get their own") {
  ModuleReplicas module = some_module(2);
  for (auto& leaves : module.leaves) leaves[1] = module.parameters[1].detach();
  const int64_t version = module.parameters[1]._version();
  const ReplicaTensors tensors(module, /*copy_always=*/true);
  CHECK(count_unlike(module) == 0);
  write(module.leaves[0][1], 3);
  CHECK(module.parameters[1][0].item<double>() == 5);
  CHECK(module.parameters[1]._version() == version);
}

TEST_CASE("after a backward, copies are made of what an optimizer may have written unseen") {
  ReplicaTensors tensors(some_module(2), /*copy_always=*/true);
  const ModuleReplicas& module = tensors.module();
  module.parameters[0].variable_data().fill_(3);
  CHECK(tensors.refresh() == 0);
  tensors.expect_step();
  CHECK(tensors.refresh() == 2 * 6 * 4);
  CHECK(count_unlike(module) == 0);
  CHECK(tensors.refresh() == 0);
  module.parameters[1].mutable_grad() = at::ones({2});  // was frozen after a backward
  tensors.expect_step();
  CHECK(tensors.refresh() == 2 * kParameterBytes);
}

TEST_CASE("a graph of a copy is older than the next one only where a version tells") {
  ModuleReplicas like_norm = some_module(2);
  like_norm.buffers = {at::full({2}, 2.0)};  // might be statistics: copied every time
  for (auto& of_replica : like_norm.replica_buffers) of_replica = {at::empty({0})};
  ReplicaTensors tensors(like_norm, /*copy_always=*/true);
  const ModuleReplicas& module = tensors.module();
  const auto loss = [&] {
    return (module.leaves[1][0].square() * module.replica_buffers[1][0]).sum();
  };
  const at::Tensor earlier = loss();
  tensors.expect_step();
  CHECK(tensors.refresh() == 2 * 6 * 4 + 2 * 4);
  earlier.backward();
  CHECK(module.leaves[1][0].grad()[0][0].item<double>() == 4);
  const at::Tensor stale = loss();
  write(module.parameters[0], 3);
  static_cast<void>(tensors.refresh());
  CHECK_THROWS_WITH(stale.backward(), Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a parameter that is not on the device of replica 0 is refused") {
  ModuleReplicas module = some_module(2);
  module.devices = {c10::Device(c10::kMeta), c10::Device(c10::kCPU)};
  CHECK_THROWS_WITH(ReplicaTensors(module),
                    Catch::Contains("[data_parallel] got parameter 'weight' on cpu") &&
                        Catch::Contains("on meta, the device of replica 0"));
}

}  // namespace trireme::replica_tensors_test
