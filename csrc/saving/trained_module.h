#pragma once

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace trireme {

// A module and the optimizer over its parameters, on one rank; null: none.
struct TrainedModule {
  torch::nn::Module* module = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;
  // Whether the optimizer's state is loaded. It is asked for parts of parameters in any case.
  bool loads_state = true;
};

}  // namespace trireme
