// trireme::optim against torch's C++ classes of the same names.

#include <trireme/optim/flat_optimizer.h>

#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <sstream>
#include <vector>

#include "catch_torch.h"

namespace trireme::flat_optimizer_test {

namespace {

std::vector<at::Tensor> parameters(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(0);
  std::vector<at::Tensor> list;
  for (const int64_t numel : {5, 64, 1000}) {
    list.push_back(at::randn({numel}).to(dtype).set_requires_grad(true));
  }
  return list;
}

void set_grads(const std::vector<at::Tensor>& params, uint64_t seed) {
  at::manual_seed(seed);
  for (const at::Tensor& param : params) param.mutable_grad() = at::randn_like(param);
}

template <typename Ours, typename Torch>
void check_steps(Ours& ours, Torch& torch, int count) {
  for (int k = 0; k < count; ++k) {
    for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&ours),
                                               static_cast<torch::optim::Optimizer*>(&torch)}) {
      for (auto& group : optimizer->param_groups()) {
        set_grads(group.params(), static_cast<uint64_t>(k));
      }
      optimizer->step();
    }
  }
  for (size_t g = 0; g < torch.param_groups().size(); ++g) {
    const auto& expected = torch.param_groups()[g].params();
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(at::allclose(ours.param_groups()[g].params()[i], expected[i], 1e-5, 1e-6));
    }
  }
}

}  // namespace

TEST_CASE("Adam, AdamW and SGD step as torch's classes do") {
  for (const bool amsgrad : {false, true}) {
    const auto adamw = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad);
    trireme::optim::AdamW ours_w(parameters(), adamw);
    torch::optim::AdamW torch_w(parameters(), adamw);
    check_steps(ours_w, torch_w, 10);
    const auto adam = torch::optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad);
    trireme::optim::Adam ours(parameters(), adam);
    torch::optim::Adam torch(parameters(), adam);
    check_steps(ours, torch, 10);
  }
  for (const double momentum : {0.0, 0.9}) {
    for (const double dampening : {0.0, 0.5}) {
      const auto options = torch::optim::SGDOptions(0.1).momentum(momentum).dampening(dampening);
      trireme::optim::SGD ours(parameters(), options);
      torch::optim::SGD torch(parameters(), options);
      check_steps(ours, torch, 10);
    }
  }
  const auto nesterov = torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true);
  trireme::optim::SGD ours(parameters(), nesterov);
  torch::optim::SGD torch(parameters(), nesterov);
  check_steps(ours, torch, 10);
}

TEST_CASE("an optimizer is a drop-in: groups, schedulers' set_lr, parameters without a gradient") {
  const auto groups = [] {
    const std::vector<at::Tensor> all = parameters();
    std::vector<torch::optim::OptimizerParamGroup> made;
    made.emplace_back(std::vector<at::Tensor>{all[0]});
    made.emplace_back(std::vector<at::Tensor>{all[1], all[2]},
                      std::make_unique<torch::optim::AdamWOptions>(3e-2));
    return made;
  };
  trireme::optim::AdamW ours(groups(), torch::optim::AdamWOptions(1e-2));
  torch::optim::AdamW torch(groups(), torch::optim::AdamWOptions(1e-2));
  check_steps(ours, torch, 3);
  for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&ours),
                                             static_cast<torch::optim::Optimizer*>(&torch)}) {
    optimizer->param_groups()[0].options().set_lr(0.5);
    optimizer->zero_grad();
    const at::Tensor param = optimizer->param_groups()[0].params()[0];
    const at::Tensor loss = optimizer->step([&] {
      const at::Tensor sum = (param * param).sum();
      sum.backward();
      return sum;
    });
    CHECK(loss.requires_grad());
  }
  CHECK(at::allclose(ours.param_groups()[0].params()[0], torch.param_groups()[0].params()[0]));
  CHECK(at::allclose(ours.param_groups()[1].params()[1], torch.param_groups()[1].params()[1]));
}

TEST_CASE("archives go from torch's class to ours and back") {
  const std::vector<at::Tensor> params = parameters();
  torch::optim::AdamW torch(params, torch::optim::AdamWOptions(1e-2));
  set_grads(params, 1);
  torch.step();
  std::stringstream archive;
  torch::save(torch, archive);

  trireme::optim::AdamW ours(params, torch::optim::AdamWOptions(5));
  torch::load(ours, archive);
  ours.step();
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *ours.state().at(params[0].unsafeGetTensorImpl()));
  CHECK(state.step() == 2);
  CHECK(ours.param_groups()[0].options().get_lr() == 1e-2);

  std::stringstream back;
  torch::save(ours, back);
  torch::load(torch, back);
  CHECK(static_cast<const torch::optim::AdamWParamState&>(
            *torch.state().at(params[0].unsafeGetTensorImpl())) == state);
}

TEST_CASE("bf16 parameters have fp32 states") {
  const std::vector<at::Tensor> params = parameters(at::kBFloat16);
  trireme::optim::AdamW optimizer(params, torch::optim::AdamWOptions(1e-2));
  set_grads(params, 1);
  optimizer.step();
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *optimizer.state().at(params[0].unsafeGetTensorImpl()));
  CHECK(state.exp_avg().scalar_type() == at::kFloat);
  CHECK(params[0].scalar_type() == at::kBFloat16);
}

TEST_CASE("a step that is refused leaves everything as it was") {
  const std::vector<at::Tensor> params = parameters();
  trireme::optim::AdamW optimizer(params, torch::optim::AdamWOptions(1e-2));
  set_grads(params, 1);
  params[2].mutable_grad() = at::ones({1000}).to_sparse();
  const at::Tensor before = params[0].detach().clone();
  CHECK_THAT(test::error_of([&] { optimizer.step(); }),
             Catch::Contains("got a gradient of layout Sparse"));
  CHECK(at::equal(params[0], before));
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *optimizer.state().at(params[0].unsafeGetTensorImpl()));
  CHECK(state.step() == 0);
}

}  // namespace trireme::flat_optimizer_test
