#pragma once

#include <trireme/common/export.h>

#include <string>

namespace trireme {

// Returns a text that two ranks have alike if what they send each other crosses no link: the boot
// and the name of their host, and their network namespace.
TRIREME_API std::string place_text();

}  // namespace trireme
