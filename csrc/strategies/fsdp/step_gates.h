#pragma once

#include <trireme/common/export.h>
#include <trireme/param/param_group.h>
#include <trireme/param/step_gate.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace trireme {

// The gates of all units under a root: one for each set of ranks that has parameters. See
// param/step_gate.h.
class TRIREME_API StepGates {
 public:
  // `ranks_of` names the set of ranks of each group.
  StepGates(const std::vector<std::shared_ptr<ParamGroup>>& groups,
            const std::vector<size_t>& ranks_of);

  // Returns whether this rank may write behind any of them.
  bool is_writing() const;
  void begin_reading();
  // Returns the factors that all ranks have in common, behind all gates.
  FactorRange begin_writing(const FactorRange& own);

 private:
  std::vector<StepGate> gates_;
};

}  // namespace trireme
