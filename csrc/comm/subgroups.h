#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <memory>

namespace trireme {

// Make communicators over the engine of another one, which they live as long as: for verbs that
// ranks call in another order than its own verbs, or that only some ranks call. Every call returns
// the same one; null if the engine can make none. Collective over all ranks the first time; throws
// what the engine does when it cannot connect.

// Returns a communicator of the same ranks.
TRIREME_API std::shared_ptr<Communicator> duplicate(Communicator& communicator);
// Returns a communicator of a part of the ranks: the first `count`, the next `count`, and so on.
// Throws ValueError if `count` is no factor of the number of ranks.
TRIREME_API std::shared_ptr<Communicator> split_contiguous(Communicator& communicator,
                                                           int64_t count);
// Returns a communicator of the ranks that have the same place among their neighbours: ranks 0,
// `count`, 2 x `count`, and so on. Throws what split_contiguous() does.
TRIREME_API std::shared_ptr<Communicator> split_strided(Communicator& communicator, int64_t count);

// Makes `other` report to peers the steps of `communicator`; its ranks do the same steps.
TRIREME_API void share_steps(const Communicator& communicator, const Communicator& other);

}  // namespace trireme
