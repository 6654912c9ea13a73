#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace trireme::horovod {

// The name of this part in messages.
inline constexpr const char* kArea = "horovod";

// Throws an exception with this text: a caller's mistake in the order of calls.
using Refuse = std::function<void(const std::string&)>;

// How often each parameter got a gradient since the last synchronization. Not thread-safe.
class TRIREME_API PassCounts {
 public:
  // Throws ValueError for fewer than one pass per step.
  PassCounts(int64_t passes_per_step, RankOf where);

  // Forgets all passes; there are that many parameters.
  void begin(size_t parameters) { counts_.assign(parameters, 0); }
  void forget() { begin(counts_.size()); }
  // Throws ValueError for fewer than one, or what `refuse` throws while there are passes.
  void set_passes_per_step(int64_t passes, const Refuse& refuse);

  // Counts a gradient of a parameter. Returns whether it is the last one of a step. Calls `refuse`,
  // before it is counted, if it is one too many.
  bool count(size_t parameter, const std::string& name, const Refuse& refuse);
  [[noreturn]] void refuse_one_more(const std::string& name, const Refuse& refuse) const;
  // Calls `refuse` if gradients have come that no step has used.
  void check_zero_grad(const Refuse& refuse) const;
  bool any() const;

 private:
  void check(int64_t passes) const;

  RankOf where_;
  int64_t passes_per_step_;
  std::vector<int64_t> counts_;
};

}  // namespace trireme::horovod
