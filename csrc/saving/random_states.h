#pragma once

#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_source.h>

#include <vector>

namespace trireme {

// The states of this rank's random generators, as tensors of kRandomTensors: "cpp/2/0/torch" is
// that of torch's CPU generator on rank 0 of 2, "cpp/2/0/cuda0" that of a GPU. Python has its own
// names (_saving/random_states.py).
std::vector<CheckpointTensor> random_to_save(const CheckpointRanks& ranks);

// Goes on with the states of this rank. Returns whether there are any, of as many ranks and of C++:
// the same on all ranks. Collective.
bool load_random(const CheckpointSource& source, const CheckpointRanks& ranks);

}  // namespace trireme
