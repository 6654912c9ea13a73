#pragma once

#include <trireme/common/export.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// [Note: JSON as text]
//
// The JSON that users keep in a checkpoint is passed on as text: a tree of values would round
// integers of more than 64 bits. A file's text is checked before it is parsed into a tree, since
// nlohmann's parser accepts any nesting, whose copies then recurse, keeps the last of several
// values of one key, and puts bytes that are no UTF-8 into its messages.

// The error of a text that is no JSON object as checkpoints have them. what() is ASCII, and follows
// "got ": "an object that has the key "a" twice".
struct TRIREME_API JsonTextError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The greatest depth accepted. Python's own parser fails at about 1,000, less the caller's stack.
constexpr size_t kMaxJsonDepth = 500;

// Throws JsonTextError for a text that is no JSON (RFC 8259), is no object, is nested too deep, or
// has a key twice in any object. Does not recurse; numbers may have any length.
TRIREME_API void check_json(std::string_view text);

// Returns one object with the members of all of these objects. If several have a key, objects are
// merged and of other values the first one stays. Throws JsonTextError as check_json() does, and
// for integers of more than 64 bits.
TRIREME_API std::string merge_json(const std::vector<std::string>& texts);

}  // namespace trireme
