#pragma once

#include <trireme/common/export.h>

#include <functional>

namespace trireme {

// Registers a function to call when the calling thread ends by end_thread(), the last one first.
// thread_local objects of other libraries are still there then: torch keeps objects of Python for a
// thread, which have to go while Python still knows the thread.
TRIREME_API void at_thread_end(std::function<void()> function);

// Calls the functions of at_thread_end(). A thread that runs code of users calls it last.
TRIREME_API void end_thread();

}  // namespace trireme
