#include <trireme/common/interruption.h>

#include <atomic>

namespace trireme {
namespace {

std::atomic<void (*)()> interruption_check{nullptr};

}  // namespace

Interruption::~Interruption() = default;

void set_interruption_check(void (*check)()) noexcept { interruption_check.store(check); }

void check_interruption() {
  if (void (*check)() = interruption_check.load(std::memory_order_relaxed)) check();
}

}  // namespace trireme
