#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/saving/checkpoint_source.h>

#include <optional>
#include <vector>

namespace trireme {

// What codes of gradients keep from step to step, as tensors of a checkpoint. Tensors of
// kCompressionTensors:
//
//   residual:<parameter>    [senders, elements], fp32
//   basis:<parameter>       Q of PowerSGD
//   threshold:<parameter>   [senders], of TopK
//   steps:<prefix><method>  two int64: steps, senders
//
// Where shards are coded, each has a basis and a threshold of its own, whose names end in
// " of shard 0/2".

// Returns this rank's tensors; absent, on all ranks alike, before the first step.
TRIREME_API std::optional<std::vector<CheckpointTensor>> codes_to_save(
    const std::vector<KeptCodes>& codes);
// Throws ValueError, naming the parameter, if a checkpoint has codes of other shapes.
TRIREME_API void check_codes(const std::vector<KeptCodes>& codes,
                             const CheckpointSource& checkpoint, RankOf where);
// Takes over the codes of a checkpoint; those of other numbers of senders as the mean. Begins with
// zeros where it has none of this method, and says so once. Collective.
TRIREME_API void load_codes(const std::vector<KeptCodes>& codes, const CheckpointSource& checkpoint,
                            RankOf where);

}  // namespace trireme
