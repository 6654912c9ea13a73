#pragma once

#include <trireme/comm/value.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::values {

// [Note: values as bytes]
//
// A value is one byte for its kind and what follows it; numbers are little-endian:
//
//   0 None   1 false   2 true   3 int: 8 bytes   4 double: 8 bytes
//   5 text, 6 bytes: a length of 8 bytes, and as many bytes; a text is UTF-8
//   7 tensor: nothing; it is the next one of the message
//   8 ref: owner, session, number (8 bytes each), and the name of its class as a text without kind
//   9 list, 10 tuple, 11 set: a count of 8 bytes, and as many values
//   12 dict: a count of 8 bytes, and as many pairs of a key and a value
//   13 int of more than 8 bytes: a length of 8 bytes, and as many bytes   14 complex: two doubles
//
// The reader trusts nothing: a length is compared with the bytes that are left, and so is a count,
// since each value takes one byte at least; no memory is taken for a count before its values were
// read; nesting is bounded; unknown kinds are refused, and so are bytes behind the value, tensors
// that no place names, invalid keys, and texts that are not UTF-8.

// The wire form of a Ref: owner rank, session, object number and class.
struct RefAddress {
  int64_t owner = 0;    // rank
  int64_t session = 0;  // tells starts of the owner apart
  int64_t number = 0;
  std::string class_name = {};

  bool operator==(const RefAddress&) const = default;
};

struct EncodedValue {
  std::string text = {};                 // the bytes
  std::vector<at::Tensor> tensors = {};  // in the order in which the bytes name them
  std::vector<RefPtr> refs = {};         // in the order in which they were met
};

// Returns the address of a Ref, a type that the codec does not know.
using AddressOf = std::function<RefAddress(const Ref& ref)>;
// Returns this rank's Ref for an address. May throw.
using AdoptRef = std::function<RefPtr(const RefAddress& address)>;

// Throws c10::ValueError for a value that is nested deeper than kDeepest, a text that is not UTF-8,
// a LargeInt that is none, or a Dict whose keys and values differ in number, and c10::TypeError for
// an invalid key, an undefined tensor, or a null Ref.
TRIREME_API EncodedValue encode(const Value& value, const AddressOf& address_of);

// Throws c10::ValueError saying what is wrong with the bytes, and what `adopt` throws.
TRIREME_API Value decode(std::string_view text, const std::vector<at::Tensor>& tensors,
                         const AdoptRef& adopt);

// Returns whether bytes are a LargeInt: more than 8, and none of them in vain.
TRIREME_API bool is_large_int(std::string_view bytes);

// Returns whether bytes are UTF-8 as Python defines it: no surrogates, no overlong forms.
TRIREME_API bool is_utf8(std::string_view bytes);

}  // namespace trireme::values
