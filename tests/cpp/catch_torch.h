#pragma once

// Every C++ test includes this instead of Catch. torch's logging also defines CHECK: included after
// Catch it would replace Catch's, and tests would pass without having asserted anything. Assert on
// the main thread only; rank threads collect.
#include <ATen/ATen.h>
#include <c10/util/Logging.h>
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
