#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/server_memory.h>

#include <string>
#include <vector>

namespace trireme::ps {

// Is what a process has to know to take part in a server that others have made.
struct Invitation {
  ServerPlan plan;
  std::vector<std::string> addresses;  // ServerMemory::addresses()
};

// Write it as JSON, and read that; plans are made anew from what they follow from. Throws
// ValueError for a text that this build of Trireme, on this host, has not written.
TRIREME_API std::string to_text(const Invitation& invitation);
TRIREME_API Invitation invitation_of(const std::string& text);

}  // namespace trireme::ps
