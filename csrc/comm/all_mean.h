#pragma once

#include <trireme/comm/communicator.h>

namespace trireme {

// Returns the mean of `tensor` over the ranks (a loss, a metric), as a new tensor without graph.
// Floating point keeps its dtype, integers become fp32. Collective; one all-reduce.
TRIREME_API at::Tensor all_mean(Communicator& communicator, const at::Tensor& tensor);

}  // namespace trireme
