#pragma once

#include <trireme/common/export.h>

namespace trireme {

// Registers a function that Context::shutdown() calls first: for what runs beside the program over
// its group. `is_failing`: an exception ends the run. Registering it again does nothing. It must
// not throw. Thread-safe.
TRIREME_API void call_before_shutdown(void (*function)(bool is_failing));

// Calls the functions that are registered.
TRIREME_API void run_before_shutdown(bool is_failing) noexcept;

}  // namespace trireme
