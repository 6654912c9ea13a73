#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/bucket_plan.h>

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace trireme {

// Returns an empty text if all ranks describe the same parameters in the same order; else, on every
// rank, the message of the same error, which names the first difference of each rank that differs
// from rank 0. Collective; one gather of a number, and four more if ranks differ. `device` is where
// the group moves tensors.
TRIREME_API std::string difference_between_ranks(Communicator& communicator, c10::Device device,
                                                 const std::vector<ParameterInfo>& parameters,
                                                 const std::string& area);

// One rank's state of one parameter, when a plan was changed.
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

// Exchanges the states and whether this rank `replans`. If no rank does, throws on all ranks for a
// requires_grad or a dtype that differs, naming parameter and ranks. Collective; one all-gather of
// 3 bytes per parameter.
TRIREME_API AgreedStates agree_on_states(Communicator& communicator, c10::Device device,
                                         const std::vector<ParameterInfo>& parameters,
                                         const std::vector<ParameterState>& states, bool replans,
                                         const std::string& area);

// The parameters that a module had when its gradients were planned, and those that it has now.
struct ParameterChange {
  const std::vector<ParameterInfo>& planned;
  const std::vector<ParameterInfo>& present;
  // For each present parameter the index of the planned one that is the same tensor, or -1.
  const std::vector<int64_t>& earlier;
  const std::vector<std::string>& beside;  // other properties that ranks must have alike
};

// Returns the first difference, as "'head.weight' was Float [10, 4], is another tensor, Float [12,
// 4]", and how many more there are; if there is none "nothing changed", or "buffers changed" if
// `beside` has lines.
TRIREME_API std::string describe_change(const ParameterChange& change);

// Throws the same ValueError on every rank, which says what each of them changed, unless all ranks
// have come by the same parameters, from the same earlier ones. Collective; one gather of a
// number, five if it throws.
TRIREME_API void check_same_change(Communicator& communicator, c10::Device device,
                                   const ParameterChange& change, const std::string& area);

}  // namespace trireme
