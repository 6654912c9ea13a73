#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The way of one layer from the ranks that hold it to those that will.
struct LayerMove {
  std::string name = {};
  std::vector<int64_t> before = {};  // ranks, at least one; the lowest is the one that sends
  std::vector<int64_t> after = {};
  // Parameters and buffers, each tensor once, on every rank under the same names; without memory
  // where the rank does not hold the layer (layer_memory.h).
  NamedTensors tensors = {};
  // What the optimizer keeps of them ("weight.exp_avg"), and what of it is no tensor, as a text:
  // those of a rank that holds the layer before.
  NamedTensors state = {};
  std::string values = {};
};

// What the optimizer keeps of a layer that has come to this rank: new tensors, on the CPU or on the
// device of the layer, as they were where they come from.
struct MovedState {
  NamedTensors state = {};
  std::string values = {};
};

// Brings layers to the ranks that hold them next, bit for bit: what is in `after` and not in
// `before` gets all tensors of the layer, in one broadcast from the lowest rank in `before`.
// Tensors without memory get memory of their own, others are written in place. Returns one entry
// per move, nothing for a layer that this rank held before, or does not hold after. Frees nothing:
// the caller takes away what it does not hold any more.
//
// `plan` is what comes next, in words: compared, like names, sizes, dtypes and ranks, on all ranks
// before anything moves. `ranks`: all that there are; null for one process.
//
// Collective: gathers of texts, one broadcast per layer that moves, over a group of those ranks
// that is made once (Communicator::split), and a last gather. Takes the memory of what comes beside
// what is there. Throws ValueError on all ranks where they differ, and where one has no memory for
// what comes; c10::DistBackendError that names the rank if one is gone or comes too late. In both
// cases the layers are where they were; tensors that were written in place may be half written in
// the second.
TRIREME_API std::vector<std::optional<MovedState>> move_layers(const std::vector<LayerMove>& moves,
                                                               const std::string& plan,
                                                               Communicator* ranks);

}  // namespace trireme
