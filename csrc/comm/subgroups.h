#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <memory>

namespace trireme {

// Makes communicators over the same engine as another one, which they live as long as: for verbs to
// which ranks may come in another order than to its own, or which not all ranks come to. Every call
// returns the same one; null where an engine can make none. Collective over all ranks the first
// time; throws what the engine does when it cannot connect.

// Returns a communicator of the same ranks.
TRIREME_API std::shared_ptr<Communicator> twin_of(Communicator& communicator);
// Returns a communicator of a part of the ranks: the first `count`, the next `count`, and so on.
// Throws ValueError where `count` is no factor of the number of ranks.
TRIREME_API std::shared_ptr<Communicator> neighbours_of(Communicator& communicator, int64_t count);
// Returns a communicator of the ranks that have the same place among their neighbours: ranks 0,
// `count`, 2 x `count`, and so on. Throws what neighbours_of() does.
TRIREME_API std::shared_ptr<Communicator> counterparts_of(Communicator& communicator,
                                                          int64_t count);

// Lets `other`, whose ranks do the same steps, tell peers of those that `communicator` is shown.
TRIREME_API void share_steps(const Communicator& communicator, const Communicator& other);

}  // namespace trireme
