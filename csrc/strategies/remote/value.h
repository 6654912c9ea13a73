#pragma once

#include <trireme/comm/ref.h>
#include <trireme/comm/value.h>
#include <trireme/comm/value_codec.h>

namespace trireme::remote {

// What calls carry, under the names that callers use.
using values::AddressOf;
using values::AdoptRef;
using values::Bytes;
using values::Complex;
using values::decode;
using values::Dict;
using values::encode;
using values::EncodedValue;
using values::is_utf8;
using values::kDeepest;
using values::kind_of;
using values::LargeInt;
using values::List;
using values::Ref;
using values::RefAddress;
using values::RefPtr;
using values::Set;
using values::Tuple;
using values::Value;
using values::Values;

}  // namespace trireme::remote
