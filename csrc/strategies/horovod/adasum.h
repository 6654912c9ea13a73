#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace trireme::horovod {

// Returns the sum of tensors of one shape in which what two of them agree on counts once (Maleki et
// al., MLSys 2021): a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2) for neighbours, and so on for what
// comes of them. A zero vector has factor 1. Dots are in fp64. Throws ValueError unless there are
// 2^n parts.
TRIREME_API at::Tensor adasum(std::vector<at::Tensor> parts);

// Puts the Adasum over the ranks into each of `tensors`, on its own. Collective: one all-gather of
// all of them. Throws ValueError unless there are 2^n ranks; c10::DistBackendError.
TRIREME_API void adasum_over_ranks(const std::vector<at::Tensor>& tensors,
                                   Communicator& communicator, const std::string& label);

// Throws ValueError naming the number, unless Adasum can be had over so many ranks.
TRIREME_API void check_adasum_ranks(int64_t ranks);

}  // namespace trireme::horovod
