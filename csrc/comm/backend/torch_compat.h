#pragma once

// Types that newer torch has for backends, under one name for all versions: torch's own if it has
// them, else similar ones, which only C++ programs can use.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/version.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

namespace trireme {

// One-sided access exists since 2.14.
#ifdef C10D_BACKEND_HAS_WINDOW
#define TRIREME_WINDOW_OVERRIDE override
using c10d::PutOptions;
using c10d::SignalOptions;
using c10d::WaitSignalOptions;
using c10d::Window;
using c10d::WindowAccessType;
using c10d::WindowAttr;
#else
#define TRIREME_WINDOW_OVERRIDE
enum class WindowAccessType : uint8_t { UNIFIED, SEPARATE };
struct WindowAttr {
  WindowAccessType access_type = WindowAccessType::UNIFIED;
};
struct PutOptions {};
struct SignalOptions {};
struct WaitSignalOptions {
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};
class Window : public torch::CustomClassHolder {};
#endif

// Abort and completion hooks have their present form since 2.15.
#if defined(C10D_BACKEND_HAS_HOOKS) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)
#define TRIREME_HOOKS_OVERRIDE override
using c10d::AbortHook;
using c10d::CompletionHook;
#else
#define TRIREME_HOOKS_OVERRIDE
using AbortHook = std::function<void()>;
struct CompletionHookArgs {
  uint64_t completionKey = 0;
  std::optional<float> duration_ms;
};
using CompletionHook = std::function<void(const CompletionHookArgs&)>;
#endif

}  // namespace trireme
