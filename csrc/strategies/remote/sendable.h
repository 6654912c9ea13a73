#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>
#include <trireme/strategies/remote/wire_messages.h>

namespace trireme::remote {

// Throw for a value that cannot be sent to any rank, this one included, as comm/value_check.h says,
// and name its place: "args[0]", "kwargs['x'][1]", "the result".
TRIREME_API void check_sendable(const CallMessage& call, bool reaches_devices);
// Checks the result of a call of that kind.
TRIREME_API void check_sendable(Verb verb, const Value& result, bool reaches_devices);

}  // namespace trireme::remote
