// A model and its optimizer go from devices to shards on devices, and back to the CPU, over an
// engine of the device and over one of the CPU.

#include <trireme/saving/module_redistribute.h>

#include <torch/optim.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <strategies/fsdp/fsdp_ranks.h>
#include <vector>

namespace trireme::redistribute_device_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

void step_alike(UnevenNet& net, AdamW& optimizer) {
  for (const at::Tensor& parameter : net->parameters())
    if (parameter.requires_grad()) parameter.mutable_grad() = at::ones_like(parameter);
  optimizer.step();
}

// Parameters, then what the optimizer keeps of them.
Values all_of(UnevenNet& net, AdamW& optimizer) {
  Values all = values_of(net->parameters());
  for (const at::Tensor& parameter : net->parameters()) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
    for (const at::Tensor& value : values_of({state.exp_avg(), state.exp_avg_sq()}))
      all.push_back(value);
    all.push_back(at::scalar_tensor(state.step(), at::kLong));
  }
  return all;
}

}  // namespace

TEST_CASE("devices become shards on devices, and these the CPU") {
  for (const SimGroup kind : {SimGroup::kAlone, SimGroup::kBesideGloo}) {
    const auto found = on_sim_ranks<int64_t>(
        3,
        [&](ThreadRank& rank) {
          const c10::Device device = sim_device(rank.where.rank);
          UnevenNet before, inside, after;
          move_to(*before, device);
          AdamW stepped(before->parameters(), AdamWOptions(0.1));
          step_alike(before, stepped);
          move_to(*inside, device);
          auto sharded = fully_shard(inside, over(rank));
          AdamW of_shards(sharded->parameters(), AdamWOptions(0.5));
          redistribute({before.get(), &stepped}, {sharded.get(), &of_shards}, rank.communicator);
          AdamW last(after->parameters(), AdamWOptions(0.5));
          redistribute({sharded.get(), &of_shards}, {after.get(), &last}, rank.communicator);
          return count_unlike(all_of(after, last), all_of(before, stepped), 0);
        },
        kind);
    CHECK(found == std::vector<int64_t>(3, 0));
  }
}

}  // namespace trireme::redistribute_device_test
