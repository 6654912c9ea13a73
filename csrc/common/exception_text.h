#pragma once

#include <trireme/common/export.h>

#include <exception>
#include <string>

namespace trireme {

// Returns the text of an exception, to be quoted in a message of ours: without the stack that torch
// appends.
TRIREME_API std::string what_of(const std::exception& error);
TRIREME_API std::string first_line_of(const std::exception& error);
// Returns the first line with text, and not more than a message for peers has room for.
TRIREME_API std::string one_line(std::string text);
// Returns "ValueError: no such file", one line, for peers to read: the type only where it is known
// by `namer`. Never throws.
TRIREME_API std::string text_of(const std::exception_ptr& error) noexcept;

// Sets the function that names the types of a language that this library does not know: it returns
// an empty text for other exceptions. Called once, when the module is loaded.
TRIREME_API void set_exception_namer(std::string (*namer)(const std::exception& error));

}  // namespace trireme
