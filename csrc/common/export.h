#pragma once

// Everything is compiled with hidden visibility; what another library may use carries this mark.
#define TRIREME_API __attribute__((visibility("default")))
