#pragma once

#include <ATen/record_function.h>

// Opens a profiler range named after a stage, as csrc/README.md names those of the two paths. Costs
// a relaxed load when nobody records.
#define TRIREME_TRACE(stage) RECORD_FUNCTION("trireme::" stage, c10::ArrayRef<const c10::IValue>{})
