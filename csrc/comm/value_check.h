#pragma once

#include <trireme/comm/value.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>

namespace trireme::values {

// Where a value comes from, for errors.
struct ValueOrigin {
  const char* area = nullptr;  // "remote"
  const char* name = nullptr;  // "args", "the result"
  RankOf where = {};           // whose it is, where that is said
};

// Throw for a value that cannot be sent to any rank, this one included, and say where it is:
// "args[0]", "kwargs['x'][1]", "the result". c10::TypeError for a tensor without dense memory of
// its own (sparse, quantized, nested, meta, a subclass), a tensor on a device if `reaches_devices`
// is false, an undefined one, a null Ref, and an invalid key; c10::ValueError for a text that is
// not UTF-8, a value that is nested deeper than kDeepest, and a Dict whose keys and values differ
// in number.
TRIREME_API void check_value(const Value& value, const ValueOrigin& origin, bool reaches_devices);
TRIREME_API void check_items(const Values& items, const ValueOrigin& origin, bool reaches_devices);
TRIREME_API void check_pairs(const Dict& dict, const ValueOrigin& origin, bool reaches_devices);

}  // namespace trireme::values
