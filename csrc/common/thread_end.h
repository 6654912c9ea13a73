#pragma once

#include <trireme/common/export.h>

#include <functional>

namespace trireme {

// Calls this when the calling thread ends, the last one first, if it is a thread that ends by
// end_thread(). thread_local objects of other libraries are still there then: torch keeps objects
// of Python for a thread, which have to go while Python still knows the thread.
TRIREME_API void at_thread_end(std::function<void()> function);

// Calls what at_thread_end() was given. A thread that runs code of users calls it last.
TRIREME_API void end_thread();

}  // namespace trireme
