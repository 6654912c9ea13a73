#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>
#include <trireme/strategies/remote/wire_messages.h>

namespace trireme::remote {

// Throw for a value that cannot be sent to any rank, this one included, and say where it is:
// "args[0]", "kwargs['x'][1]", "the result". c10::TypeError for a tensor without dense memory of
// its own (sparse, quantized, nested, meta, a subclass), a tensor on a device if `reaches_devices`
// is false, an undefined one, a null Ref, and an invalid key; c10::ValueError for a text that is
// not UTF-8, a value that is nested deeper than kDeepest, and a Dict whose keys and values differ
// in number.
TRIREME_API void check_sendable(const CallMessage& call, bool reaches_devices);
// Checks the result of a call of that kind.
TRIREME_API void check_sendable(Verb verb, const Value& result, bool reaches_devices);

}  // namespace trireme::remote
