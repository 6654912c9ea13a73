#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trireme {

// A communicator that can make another one of the same ranks.
struct HasTwin {
  virtual ~HasTwin() = default;
  // Null where it cannot. The same one in every call; lives as long as this one.
  virtual std::shared_ptr<Communicator> twin() = 0;
};

// Another communicator of the same ranks, over the same engine: for verbs to which ranks may come
// in another order than to those of `communicator`. Null where that is not over Gloo on CPU.
// Collective the first time; throws what Gloo does when it cannot connect.
TRIREME_API std::shared_ptr<Communicator> twin_of(Communicator& communicator);

// Another group of all ranks of `group`, with CPU tensors only; `name`: of its keys in that group's
// Store, once per group. Collective.
c10::intrusive_ptr<c10d::ProcessGroup> split_all(c10d::ProcessGroup& group,
                                                 const std::string& name);

}  // namespace trireme
