#pragma once

#include <trireme/common/export.h>
#include <trireme/grad/codes/compression.h>

#include <cstdint>
#include <optional>
#include <string>

namespace trireme {

// [Note: rounds]
//
// A *worker* trains a model on its own for some steps: one rank, or several whose strategy (DDP,
// ZeRO, fully_shard) keeps one model among them. Then workers average. What they have agreed on
// last is the *anchor*.
//
//   LocalSGD   parameters become their mean over the workers
//   DiLoCo     pseudo-gradient = anchor - parameter; its mean over the workers is the gradient of
//              the anchor for a step of the outer optimizer;
//              parameter = lerp(anchor, parameter, fragment_update_alpha)
//
// DiLoCo may cut the parameters into fragments, of which each round moves one. With a period of
// S = sync_every / fragments steps, fragment (round mod fragments) leaves after step S - delay of
// the round and is applied after step S; training goes on meanwhile:
//
//   step      1    2    3    4    5    6  | 1    2 ...      S = 6, delay 2
//   fragment 0               leaves    applied
//   fragment 1                            |                 leaves after step 4 of this round
//
// Means are those of values in fp32 (fp64 where parameters are). With `compression` what travels is
// a code of anchor - parameter, also for LocalSGD, and workers are the senders of [Note: gradient
// compression].

// Of errors.
inline constexpr const char* kRoundsArea = "local_sgd";

// What rounds are asked for.
struct RoundOptions {
  int64_t sync_every = 0;
  int64_t warmup_steps = 0;
  int64_t fragments = 1;
  int64_t fragment_sync_delay = 0;
  double fragment_update_alpha = 0;
  std::optional<Compression> compression = {};
  bool has_outer_step = false;  // DiLoCo

  // The steps of a round; of LocalSGD, behind its warmup.
  int64_t period() const { return sync_every / fragments; }
};

// Throws ValueError, naming the argument, for options that cannot be.
TRIREME_API void check(const RoundOptions& options);
// Returns the options as ranks compare them: "DiLoCo(sync_every=50, fragments=5, ...)".
TRIREME_API std::string to_string(const RoundOptions& options);

}  // namespace trireme
