#pragma once

#include <trireme/common/export.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// [Note: JSON as text]
//
// What users keep in a checkpoint is passed on as the text that they gave: a tree of values would
// round integers of more than 64 bits. And what a file says is looked through before a tree is made
// of it, since nlohmann's takes any nesting, whose copies then recurse; the last of several values
// of one key; and puts bytes that are no UTF-8 into its messages.

// Says that a text is no JSON object as checkpoints have them. what() is ASCII, and is to follow
// "got ": "an object that has the key "a" twice".
struct TRIREME_API JsonTextError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Deeper values are refused. Python's own parser fails at about 1,000, less the caller's stack.
constexpr size_t kMaxJsonDepth = 500;

// Throws JsonTextError for what is no JSON (RFC 8259), is no object, is nested too deep, or has a
// key twice in any object. Takes no stack; numbers may have any length.
TRIREME_API void check_json(std::string_view text);

// Returns one object that has the members of all of these objects. Where several have a key,
// objects are merged and of other values the first one stays. Throws what check_json() throws, and
// for integers of more than 64 bits.
TRIREME_API std::string merge_json(const std::vector<std::string>& texts);

}  // namespace trireme
