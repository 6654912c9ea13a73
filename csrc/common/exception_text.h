#pragma once

#include <trireme/common/export.h>

#include <exception>
#include <string>

namespace trireme {

// Returns what an exception says, to be quoted in a message of ours: without the stack that torch
// appends.
TRIREME_API std::string what_of(const std::exception& error);
TRIREME_API std::string first_line_of(const std::exception& error);

}  // namespace trireme
