#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Is what libFuzzer calls, and fuzz_driver.cpp.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace trireme::soak {

// Returns inputs that come far; none is empty. Only fuzz_driver.cpp asks.
std::vector<std::vector<uint8_t>> seeds();

}  // namespace trireme::soak
