#pragma once

#include <trireme/common/error.h>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

namespace trireme {

// Functions that every data-parallel program needs and would otherwise write by hand.

// Returns the seed of one rank, of which all 64 bits depend on both: step `rank` of splitmix64 that
// starts at `seed`. `seed + rank` would make rank 1 of one run equal rank 0 of the next.
TRIREME_API uint64_t rank_seed(uint64_t seed, int64_t rank);
// Returns a random generator that differs between ranks and is the same in every run, and in
// Python: for numbers that ranks must draw independently (augmentation, noise).
TRIREME_API at::Generator rank_generator(uint64_t seed, int64_t rank,
                                         c10::Device device = c10::kCPU);

// Writes a line to stderr that begins with [rank/world]. Works before init(), too, with the
// launcher's variables.
TRIREME_API void write_line(const std::string& line, bool on_rank_0_only);
// Write news from rank 0 alone, and warnings from any rank.
template <typename... Parts>
void log_info(const Parts&... parts) {
  write_line(c10::str(parts...), /*on_rank_0_only=*/true);
}
template <typename... Parts>
void log_warning(const Parts&... parts) {
  write_line(c10::str(parts...), /*on_rank_0_only=*/false);
}

}  // namespace trireme
