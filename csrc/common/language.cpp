#include <trireme/common/language.h>

#include <atomic>

namespace trireme {
namespace {

std::atomic<bool> speaks_python{false};

}  // namespace

void speak_python() { speaks_python.store(true, std::memory_order_relaxed); }

const char* in_language(const Advice& advice) {
  return speaks_python.load(std::memory_order_relaxed) ? advice.python : advice.cpp;
}

}  // namespace trireme
