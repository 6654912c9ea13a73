#pragma once

#include <trireme/common/export.h>

namespace trireme {

// One advice, for both kinds of programs, in texts that live for ever.
struct Advice {
  const char* cpp;
  const char* python;
};

// Makes messages speak to a Python program from now on. Called by the Python module when it is
// imported, and by no C++ program. Any thread may call it.
TRIREME_API void speak_python();
// Returns the advice for the program that this process runs. Any thread may call it.
TRIREME_API const char* in_language(const Advice& advice);

}  // namespace trireme
