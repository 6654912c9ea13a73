#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/bucket_plan.h>

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace trireme {

// All ranks must describe the same parameters in the same order. Where they do not, every rank
// throws the same ValueError, naming the first difference of each rank that differs from rank 0.
// Collective; 3 small collectives. `device` is where the group moves tensors.
TRIREME_API void check_same_parameters(Communicator& communicator, c10::Device device,
                                       const std::vector<ParameterInfo>& parameters,
                                       const std::string& area);

// What every rank has to say about one parameter when somebody changed a plan.
struct ParameterState {
  bool requires_grad = false;
  bool used = false;  // since the last synchronization
  at::ScalarType dtype = at::kFloat;
};

// Exchanges the states; throws on all ranks, naming parameter and ranks, where requires_grad or
// dtype differ. Returns, by parameter, whether any rank used it. Collective; one all-gather of 2
// bytes per parameter.
TRIREME_API std::vector<bool> agree_on_states(Communicator& communicator, c10::Device device,
                                              const std::vector<ParameterInfo>& parameters,
                                              const std::vector<ParameterState>& states,
                                              const std::string& area);

}  // namespace trireme
