#pragma once

#include <trireme/common/export.h>

namespace trireme {

// Holds one advice, for both kinds of programs, in texts that live for ever.
struct Advice {
  const char* cpp;
  const char* python;
};

// Makes messages speak to a Python program from now on. The Python module says so when it is
// imported; no C++ program does. Any thread may call it.
TRIREME_API void speak_python();
// Returns what a message tells the program that this process runs. Any thread may call it.
TRIREME_API const char* in_language(const Advice& advice);

}  // namespace trireme
