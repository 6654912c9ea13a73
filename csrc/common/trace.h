#pragma once

#include <ATen/record_function.h>

// Opens a profiler range named after a stage of the two flows (DESIGN.md 4). Costs a relaxed load
// when nobody records.
#define TRIREME_TRACE(stage) RECORD_FUNCTION("trireme::" stage, c10::ArrayRef<const c10::IValue>{})
