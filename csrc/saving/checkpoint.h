#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_files.h>
#include <trireme/saving/checkpoint_folder.h>
#include <trireme/saving/safetensors_file.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: saving and loading without gathering]
//
// Every rank says which tensors it knows and which part of each it has; together they plan the
// files. One rank makes them, all write the bytes that they have, one replaces the previous
// checkpoint. Loading, every rank reads the bytes that it needs. So no rank ever holds more than
// its parts, and any number of ranks, under any strategy, loads what another one saved.
//
// What goes wrong on one rank is raised on all: there its own error, elsewhere one that names it.

// Names a tensor by the name that it has in the plain model, and this rank's part of it.
struct CheckpointTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;  // sizes of the whole
  TensorPart part = {};
};

// Says who saves or loads together; a null communicator is a rank alone. `device`: where it moves
// tensors.
struct CheckpointRanks {
  std::shared_ptr<Communicator> communicator;
  c10::Device device = c10::kCPU;

  RankOf where() const { return communicator ? communicator->rank_of() : RankOf{0, 1}; }
};

struct CheckpointContent {
  // Lists tensors by kind: "model", "optimizer". Each element is in the part of one rank, or of
  // several that have the same part, of which the lowest writes it; a rank need not know what
  // others have.
  std::map<std::string, std::vector<CheckpointTensor>> tensors;
  // Holds JSON objects by file name. What ranks say under kOptimizerText is merged
  // (optimizer_text.h); integers of more than 64 bits are refused there.
  // kExtraText is rank 0's alone, byte for byte (see json_text.h). There are no other names.
  std::map<std::string, std::string> texts;
};

struct SaveCheckpointRequest {
  std::string path;
  const CheckpointContent& content;
  int64_t max_file_bytes = int64_t{5'000'000'000};
};

// Replaces what checkpoint there is at `path`, in one step at the end. Collective; a few small
// gathers, and each rank's part once to the disk, which is waited for. Throws ValueError for what
// cannot be saved, c10::Error where the system refuses; the previous checkpoint is loadable then.
TRIREME_API void save_checkpoint(const SaveCheckpointRequest& request,
                                 const CheckpointRanks& ranks);

// Says "Float of sizes [2, 3]".
std::string describe(at::ScalarType dtype, at::IntArrayRef sizes);
// Returns what every rank says, by rank; see comm/gather_texts.h. Collective.
std::vector<std::string> gather_texts(const std::string& own, const CheckpointRanks& ranks);

// Collective. Calls `work`; what it throws on one rank is raised on all of them.
TRIREME_API void together(const CheckpointRanks& ranks, const std::function<void()>& work);

}  // namespace trireme
