// Messages with tensors on devices, over engines that move them from device to device.

#include <trireme/comm/make_channels.h>
#include <trireme/comm/tensor_channel.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <vector>

namespace trireme::tensor_channel_device_test {

using namespace trireme::test;

TEST_CASE("tensors come to the receiver's device, those of the CPU to the CPU") {
  for (const SimGroup kind : {SimGroup::kAlone, SimGroup::kBesideGloo}) {
    int64_t wrong = 0;
    std::vector<c10::Device> devices;
    run_sim_ranks(
        2,
        [&](ThreadRank& rank) {
          const c10::Device own = sim_device(rank.where.rank);
          const auto channels = make_channels(*rank.communicator, {{0, 1, 2, "there"}});
          for (int64_t i = 0; i < 5; ++i) {
            const std::vector<at::Tensor> expected{at::full({3, 4}, double(i)).t(),
                                                   at::full({1000 * i}, i, at::kLong),
                                                   at::full({2}, double(i), at::kBFloat16)};
            if (rank.where.rank == 0) {
              channels->sender(0)->send(
                  {.micro_batch = i,
                   .text = std::string(4000 * static_cast<size_t>(i), 'x'),
                   .tensors = {expected[0].to(own), expected[1].to(own), expected[2]}},
                  "0F");
              continue;
            }
            const TensorMessage message = channels->receiver(0)->receive(0, i, "1F");
            channels->receiver(0)->done_with_one();
            for (size_t t = 0; t < expected.size(); ++t)
              wrong += !at::equal(message.tensors[t].cpu(), expected[t]);
            if (i == 4)
              for (const at::Tensor& tensor : message.tensors) devices.push_back(tensor.device());
          }
          const at::Tensor met = at::ones({1}, rank.communicator->device());
          rank.communicator->all_reduce({met}, ReduceOp::kSum, "the end").wait();
          met.cpu();
        },
        kind);
    CHECK(wrong == 0);
    CHECK(devices == std::vector<c10::Device>{sim_device(1), sim_device(1), c10::kCPU});
  }
}

}  // namespace trireme::tensor_channel_device_test
