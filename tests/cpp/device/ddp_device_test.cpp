// DDP and ZeRO on a device with streams and an engine of its own: they train as one process does on
// the whole batch.

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::ddp_device_test {

using namespace trireme::test;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

UnevenNet net_on(c10::Device device) {
  UnevenNet net;
  move_to(*net, device);
  return net;
}

// Steps of which every other one uses the head, and one sums up two backwards under `no_sync`.
template <typename Model, typename Optimizer, typename NoSync>
void train_on(Model& model, Optimizer& optimizer, RankOf where, c10::Device device,
              const NoSync& no_sync) {
  const auto backward = [&](int64_t batch) {
    model->forward(part_of_batch(batch, where).to(device), batch % 2 == 0).backward();
  };
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    if (step == 2) {
      const auto guard = no_sync();
      backward(7);
    }
    backward(step);
    optimizer.step();
  }
}

struct Nothing {
  ~Nothing() {}  // so that nobody calls it unused
};
const auto kNothing = [] { return Nothing(); };

Values trained_alone() {
  UnevenNet net;
  AdamW optimizer(net->parameters(), AdamWOptions(0.01));
  train_on(net, optimizer, {0, 1}, c10::kCPU, kNothing);
  return values_of(net->parameters());
}

std::vector<DdpOptions> kinds_of_ddp() {
  std::vector<DdpOptions> kinds(4);
  kinds[1].bucket_cap_mb = 1e-4;
  kinds[2].gradient_as_bucket_view = true;
  kinds[3].bucket_cap_mb = 1e-4;
  kinds[3].gradient_as_bucket_view = true;
  return kinds;
}

}  // namespace

TEST_CASE("DDP on devices, in buckets of all sizes") {
  const Values expected = trained_alone();
  for (const int64_t world : {1, 2, 3}) {
    for (size_t kind = 0; kind < kinds_of_ddp().size(); ++kind) {
      CAPTURE(world, kind);
      const auto found = on_sim_ranks<Values>(world, [&](ThreadRank& rank) {
        const c10::Device device = sim_device(rank.where.rank);
        DistributedDataParallel<UnevenNet> model(net_on(device), rank.communicator,
                                                 kinds_of_ddp()[kind]);
        AdamW optimizer(model->parameters(), AdamWOptions(0.01));
        train_on(model, optimizer, rank.where, device, [&] { return model->no_sync(); });
        return values_of(model->parameters());
      });
      for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
    }
  }
}

TEST_CASE("DDP sends gradients in another dtype") {
  const Values expected = trained_alone();
  DdpOptions options;
  options.reduce_dtype = at::kBFloat16;
  const auto found = on_sim_ranks<Values>(2, [&](ThreadRank& rank) {
    const c10::Device device = sim_device(rank.where.rank);
    DistributedDataParallel<UnevenNet> model(net_on(device), rank.communicator, options);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    train_on(model, optimizer, rank.where, device, [&] { return model->no_sync(); });
    return values_of(model->parameters());
  });
  CHECK(count_unlike(found[0], found[1], 0) == 0);
  for (size_t i = 0; i < expected.size(); ++i)
    CHECK((found[0][i] - expected[i]).abs().max().item<double>() < 0.02);
}

TEST_CASE("ZeRO on devices, stages 1 and 2") {
  const Values expected = train_alone<AdamW>(AdamWOptions(0.01), 5);
  for (const SimGroup kind : {SimGroup::kBesideGloo, SimGroup::kAlone}) {
    for (const int64_t stage : {1, 2}) {
      for (const auto placement : {ShardPlacement::kDim0, ShardPlacement::kFlat}) {
        CAPTURE(kind, stage, placement);
        const auto found = on_sim_ranks<Values>(
            3,
            [&](ThreadRank& rank) {
              const c10::Device device = sim_device(rank.where.rank);
              UnevenNet net = net_on(device);
              std::optional<DistributedDataParallel<UnevenNet>> ddp;
              if (stage == 1) ddp.emplace(net, rank.communicator);
              ZeroRedundancyOptimizer<AdamW> optimizer(net, AdamWOptions(0.01), rank.communicator,
                                                       {.stage = stage, .placement = placement});
              for (int64_t step = 0; step < 5; ++step) {
                optimizer.zero_grad();
                const at::Tensor part = part_of_batch(step, rank.where).to(device);
                const bool with_head = step % 2 == 0;
                (ddp ? (*ddp)->forward(part, with_head) : net->forward(part, with_head)).backward();
                optimizer.step();
              }
              return values_of(net->parameters());
            },
            kind);
        for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
      }
    }
  }
}

}  // namespace trireme::ddp_device_test
