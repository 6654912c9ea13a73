#pragma once

#include <trireme/common/export.h>

namespace trireme {

// Frees the nodes that a backward which an exception left has put into this thread's queue and not
// run: autograd drops them when the thread runs its next backward, and until then they keep the
// graph, and with it the memory of parameters, which may be that of a host. Runs a backward of one
// node, behind all others. Does nothing inside of a backward. Never throws.
TRIREME_API void free_abandoned_nodes() noexcept;

}  // namespace trireme
