#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/server_memory.h>

#include <string>
#include <vector>

namespace trireme::ps {

// The data that a process needs to join a server that others have made.
struct Invitation {
  ServerPlan plan;
  std::vector<std::string> addresses;  // ServerMemory::addresses()
};

// Write and read an invitation as JSON; the reader recomputes the plans. Throws ValueError for a
// text that this build of Trireme, on this host, has not written.
TRIREME_API std::string to_text(const Invitation& invitation);
TRIREME_API Invitation invitation_of(const std::string& text);

}  // namespace trireme::ps
