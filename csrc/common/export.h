#pragma once

// Marks what another library may use; everything else is compiled with hidden visibility.
#define TRIREME_API __attribute__((visibility("default")))
