#pragma once

#include <exception>
#include <string>

namespace trireme {

// What an exception of torch or Gloo says, to be quoted in ours: one line, without the stack.
std::string first_line_of(const std::exception& error);

}  // namespace trireme
