// Who is asked before a C++ optimizer writes.

#include <trireme/optim/write_gate.h>

#include <trireme/optim/flat_optimizer.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::write_gate_test {

using torch::optim::SGDOptions;

namespace {

// Says what it is asked for, by the parameter's first value.
class NotingGate final : public WriteGate {
 public:
  explicit NotingGate(std::string& said) : said_(said) {}
  void before_write(const at::Tensor& parameter) override {
    said_ += " gate " + std::to_string(parameter[0].item<int>());
  }

 private:
  std::string& said_;
};

at::Tensor parameter(double value) {
  at::Tensor made = at::full({2}, value).set_requires_grad(true);
  made.mutable_grad() = at::ones({2});
  return made;
}

}  // namespace

TEST_CASE("gates are asked for each parameter that has one, before it is written") {
  const std::vector<at::Tensor> parameters{parameter(1), parameter(2), parameter(3)};
  std::string said;
  const auto gate = std::make_shared<NotingGate>(said);
  put_gate({parameters[2], parameters[0]}, gate);
  torch::optim::SGD plain(parameters, SGDOptions(10));
  trireme::step(plain);
  CHECK(said == " gate 1 gate 3");
  CHECK(parameters[2][0].item<int>() == -7);
  CHECK(gate_of(parameters[0]) == gate);
  CHECK(gate_of(parameters[1]) == nullptr);
}

TEST_CASE("our optimizers ask by themselves; a closure comes first, its loss comes back") {
  const std::vector<at::Tensor> parameters{parameter(1), parameter(2)};
  std::string said;
  const auto gate = std::make_shared<NotingGate>(said);
  put_gate(parameters, gate);
  const auto closure = [&] {
    said += " closure";
    return at::full({}, 5.0);
  };
  optim::SGD ours(parameters, SGDOptions(0));
  CHECK(ours.step(closure).item<int>() == 5);
  CHECK(said == " closure gate 1 gate 2");
  said.clear();
  torch::optim::AdamW plain(parameters, torch::optim::AdamWOptions(0));
  CHECK(trireme::step(plain, closure).item<int>() == 5);
  CHECK(said == " closure gate 1 gate 2");
}

TEST_CASE("a gate that is gone is not asked, and no tensor is kept for it") {
  std::string said;
  at::Tensor own = parameter(1);
  const c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> weak(
      own.getIntrusivePtr());
  put_gate({own}, std::make_shared<NotingGate>(said));
  torch::optim::SGD plain({own}, SGDOptions(0.1));
  trireme::step(plain);
  CHECK(said.empty());
  const auto gate = std::make_shared<NotingGate>(said);
  put_gate({own}, gate);
  plain.param_groups().clear();
  own.reset();
  CHECK(weak.expired());
}

}  // namespace trireme::write_gate_test
