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

#include <functional>
#include <string>

namespace trireme::test {

// The message that `call` throws, or "no error".
template <typename Error = c10::Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace trireme::test
