#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <vector>

namespace trireme {

// [Note: freezing from the bottom up]
//
// Layers near the input converge first (PipeTransformer, arXiv 2102.03161). Training goes in
// intervals: epochs, or any number of steps. Before each of them a rule says how many layers,
// counted from the input on, are frozen from then on: those behind them are trained. There are two
// rules. The schedule depends on nothing but the number of the interval. The other one looks at
// gradients: up to the layer that has the smallest one, but no further than the schedule would go
// from here.

// Returns how many of `layers` layers are frozen in epoch `epoch` (from 0 on):
// ceil(layers (1 - (1 - alpha)^epoch)). Throws ValueError unless alpha is between 0 and 1, and the
// others are not negative.
TRIREME_API int64_t frozen_by_schedule(int64_t layers, double alpha, int64_t epoch);

// Returns that for each of the epochs 0 to epochs - 1.
TRIREME_API std::vector<int64_t> freeze_schedule(int64_t layers, double alpha, int64_t epochs);

// What a rule knows at the end of an interval.
struct FreezePoint {
  int64_t layers = 0;
  int64_t frozen = 0;           // of them, in the interval that ends
  int64_t interval = 0;         // its number, from 0 on
  std::vector<double> norms{};  // of the gradients of the other layers; NaN where there is none
};

// Returns min(ceil(F + alpha (L - F)), argmin of the norms of layers l > F), layers counted from 1,
// the first of equals. A norm that is not finite ends the search: those behind it do not count;
// with none in front of it nothing more is frozen.
TRIREME_API int64_t frozen_by_gradient(const FreezePoint& point, double alpha);

}  // namespace trireme
