#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace trireme::shm {

enum class FaultKind : uint8_t {
  kMismatch,    // ranks called different operations; nothing was moved, the group still works
  kPeerLost,    // a process died or left
  kTimeout,     // a living rank did not come
  kAborted,     // another rank gave up and left a message
  kAbandoned,   // a rank left the common work; the next collective works (HostGroup::abandon)
  kMemory,      // no room for a segment
  kForked,      // used in a child of the process that made the group
  kNotPossible  // this host does not let its processes share memory
};

// The exception of everything in shm/. The text is complete, in the form of common/error.h; comm/
// turns it into c10d's exception types.
class Fault : public std::runtime_error {
 public:
  Fault(FaultKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  FaultKind kind() const { return kind_; }

 private:
  FaultKind kind_;
};

}  // namespace trireme::shm
