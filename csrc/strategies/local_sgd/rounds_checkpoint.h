#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_source.h>
#include <trireme/strategies/local_sgd/rounds.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// [Note: rounds in a checkpoint]
//
// The tensors of kind "model" are the anchors. Those of kRoundsTensors:
//
//   state                             steps, step, round, workers, the fragment on its way (-1:
//                                     none), steps of codes
//   arrived:<parameter>               its mean
//   worker <w>:weight
//   worker <w>:parameter:<parameter>  as that worker has it
//   worker <w>:residual:<parameter>   what its codes have left out, [sizes], of a complex one
//                                     [sizes, 2]
//   worker <w>:basis:<parameter>@<p>, worker <w>:threshold:<parameter>@<p>
//                                     what a method keeps beside it, of the part that begins at p
//   worker <w>:optimizer:...          the inner optimizer's state, as kind "optimizer" has it
//   outer <i>:...                     the i-th outer optimizer's

// The part that a rank has of a parameter, and its name in the plain model.
struct RoundPart {
  std::string name = {};
  std::vector<int64_t> sizes = {};  // of the whole
  std::vector<int64_t> first = {};
};

// Returns the prefix of what worker `number` has.
std::string worker_prefix(int64_t number);

// Put anchors in place of the parameters among `tensors`, and return the rest of what rounds keep
// but optimizers. `parts` by parameter. Wait for a fragment on its way. Collective over all
// workers.
TRIREME_API void put_anchors(const Rounds& rounds, const std::vector<RoundPart>& parts,
                             std::vector<CheckpointTensor>& tensors);
TRIREME_API std::vector<CheckpointTensor> rounds_to_save(Rounds& rounds,
                                                         const std::vector<RoundPart>& parts);

// Loads what these have saved, once the parameters are the checkpoint's, and returns whether there
// were as many workers. If not, parameters stay, and codes go on with the mean of what those of all
// workers had left out. Collective over all workers.
TRIREME_API bool load_rounds(Rounds& rounds, const std::vector<RoundPart>& parts,
                             const CheckpointSource& source);

// Returns one text of an optimizer for the texts of all ranks of this worker; -1: of all ranks.
// Collective.
TRIREME_API std::string merge_texts_of(int64_t worker, const std::string& text,
                                       const CheckpointRanks& ranks);

}  // namespace trireme
