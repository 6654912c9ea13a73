// A communication hook of one's own: gradients travel as bf16, half the bytes, and what rounding
// loses is added to the next step's. Any c10d::CommHookInterface written for torch's DDP serves;
// LibTorch brings c10d::FP16CompressCommHook.
//
//   torchrun --no-python --nproc-per-node 2 build/current/examples/cpp/comm_hook [plain]

#include <trireme/trireme.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <cstdio>
#include <map>
#include <string>
#include <utility>

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class Bf16WithFeedback : public c10d::CppCommHookInterface<Group> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  // Called once per bucket and step, during backward, in the same order on all ranks; replaces the
  // all-reduce, and the division by the number of ranks.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    torch::Tensor gradients = bucket.getBufferRef() / state_->getSize();
    torch::Tensor& lost = lost_[bucket.getIndex()];
    if (lost.defined() && lost.sizes() == gradients.sizes()) gradients += lost;
    std::vector<torch::Tensor> sent{gradients.to(torch::kBFloat16)};
    lost = gradients - sent[0].to(gradients.scalar_type());
    return state_->allreduce(sent)->getFuture()->then(
        [dtype = gradients.scalar_type()](c10::ivalue::Future& reduced) -> c10::IValue {
          return c10::IValue(reduced.value().toTensorVector()[0].to(dtype));
        },
        c10::TensorType::get());
  }

  torch::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  std::map<size_t, torch::Tensor> lost_;  // each bucket has its own
};

int main(int argc, char** argv) {
  trireme::Context ctx = trireme::init();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  net->to(ctx.device());
  trireme::DistributedDataParallel<torch::nn::Sequential> model(net);
  if (argc < 2 || std::string(argv[1]) != "plain") {
    const auto hook = std::make_shared<Bf16WithFeedback>(ctx.process_group());
    model->register_comm_hook(trireme::make_comm_hook(hook, ctx.communicator()));
  }
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));

  const torch::Tensor inputs = torch::randn({48, 16});
  const torch::Tensor targets = inputs.sum(1, true).sin();
  const auto part = [&](const torch::Tensor& all) {
    return all.chunk(ctx.world())[ctx.rank()].to(ctx.device());
  };
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(part(inputs)), part(targets));
    loss.backward();
    optimizer.step();
    const double mean = trireme::all_mean(*ctx.communicator(), loss).item<double>();
    if (ctx.rank() == 0 && step % 20 == 19) std::printf("step %2d  loss %.6f\n", step + 1, mean);
  }
  return 0;
}
