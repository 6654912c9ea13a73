#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/bucket_plan.h>

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace trireme {

// All ranks must describe the same parameters in the same order. Where they do not, every rank gets
// the message of the same error, which names the first difference of each rank that differs from
// rank 0; else an empty text. Collective; 3 small collectives. `device` is where the group moves
// tensors.
TRIREME_API std::string difference_between_ranks(Communicator& communicator, c10::Device device,
                                                 const std::vector<ParameterInfo>& parameters,
                                                 const std::string& area);

// What every rank has to say about one parameter when somebody changed a plan.
struct ParameterState {
  bool requires_grad = false;
  bool used = false;  // since the last synchronization
  at::ScalarType dtype = at::kFloat;
  at::ScalarType gradient_dtype = at::kFloat;
  bool moved = false;  // lies in other memory
};

struct AgreedStates {
  std::vector<bool> used;   // one per parameter: used by any rank
  std::vector<bool> moved;  // one per parameter: moved on any rank
  bool replans = false;     // some rank has other parameters than planned; states may then differ
};

// Exchanges the states and whether this rank `replans`; throws on all ranks, naming parameter and
// ranks, where no rank does and requires_grad or a dtype differ. Collective; one all-gather of 3
// bytes per parameter.
TRIREME_API AgreedStates agree_on_states(Communicator& communicator, c10::Device device,
                                         const std::vector<ParameterInfo>& parameters,
                                         const std::vector<ParameterState>& states, bool replans,
                                         const std::string& area);

// What a module had when its gradients were planned, and what it has now.
struct ParameterChange {
  const std::vector<ParameterInfo>& planned;
  const std::vector<ParameterInfo>& present;
  // Holds for each present parameter the planned one that is the same tensor, -1 if there is none.
  const std::vector<int64_t>& earlier;
  const std::vector<std::string>& beside;  // what else ranks must have alike
};

// Returns the first difference, as "'head.weight' was Float [10, 4], is another tensor, Float [12,
// 4]", and how many more there are; if there is none "nothing changed", or "buffers changed" where
// there is something beside.
TRIREME_API std::string describe_change(const ParameterChange& change);

// All ranks must have come by the same parameters, from the same earlier ones. Where they have not,
// every rank throws the same ValueError, which says what each of them changed. Collective; two
// small gathers, four where it throws.
TRIREME_API void check_same_change(Communicator& communicator, c10::Device device,
                                   const ParameterChange& change, const std::string& area);

}  // namespace trireme
