#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/span.h>

#include <cstdint>
#include <string>
#include <variant>

namespace trireme::ps {

// The first values of a row of a sparse table. Random ones are a function of the seed and the row's
// id alone (Philox 4x32-10, the id being the subsequence): equal for any number of workers, servers
// and hosts, and any order of asking.
struct Zeros {};
struct Normal {
  double std = 1;  // the mean is 0
};
struct Uniform {
  double bound = 1;  // in [-bound, bound]
};
using RowInit = std::variant<Zeros, Normal, Uniform>;

// Returns what is wrong with `init`, as "got Normal(std=-1), expected ..."; empty if nothing is.
TRIREME_API std::string complaint_about(const RowInit& init);
// Returns "Normal(std=0.01)".
TRIREME_API std::string to_string(const RowInit& init);
// Writes the first values of a row; they are rounded to the dtype once, from fp32 (fp64 for fp64).
TRIREME_API void fill_row(const RowInit& init, uint64_t seed, int64_t id, Span row);

}  // namespace trireme::ps
