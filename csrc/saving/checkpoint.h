#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_files.h>
#include <trireme/saving/checkpoint_folder.h>
#include <trireme/saving/safetensors_file.h>

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

class Snapshot;  // memory/snapshot.h

// [Note: saving and loading without gathering]
//
// Every rank announces which tensors it knows and which part of each it has; together they plan the
// files. Rank 0 makes them, all ranks write their bytes, and rank 0 replaces the previous
// checkpoint. To load, every rank reads the bytes that it needs. So no rank ever holds more than
// its parts, and any number of ranks, under any strategy, loads what another number saved.
//
// An error of one rank is raised on all: there as it is, elsewhere as an error that names the rank.

// A tensor, by its name in the plain model, and this rank's part of it.
struct CheckpointTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;  // sizes of the whole
  TensorPart part = {};
};

// The ranks that save or load together; a null communicator is a single rank. `device`: the device
// of the tensors in its collectives.
struct CheckpointRanks {
  std::shared_ptr<Communicator> communicator;
  c10::Device device = c10::kCPU;

  RankOf where() const { return communicator ? communicator->rank_of() : RankOf{0, 1}; }
};

struct CheckpointContent {
  // Tensors by kind: "model", "optimizer", "tables". Each element is in the part of one rank, or of
  // several that have the same part, of which the lowest writes it; a rank need not know the parts
  // of others.
  std::map<std::string, std::vector<CheckpointTensor>> tensors;
  // JSON objects by file name. The ranks' texts under kOptimizerText are merged (optimizer_text.h),
  // where integers of more than 64 bits are refused. kExtraText is rank 0's alone, byte for byte
  // (see json_text.h). No other names are allowed.
  std::map<std::string, std::string> texts;
};

struct SaveCheckpointRequest {
  std::string path;
  const CheckpointContent& content;
  int64_t max_file_bytes = int64_t{5'000'000'000};
  // The values of the parts, in the order of the content, an undefined part as an empty tensor;
  // null: they are read from the parts.
  Snapshot* snapshot = nullptr;
  // Asked while the parts are written; null: never.
  const std::atomic<bool>* is_given_up = nullptr;
};

// Saves a checkpoint, which replaces the one at `path` in one step at the end, and returns the
// bytes of tensors that this rank has written. Collective: a few small gathers; each rank writes
// its parts once and waits for the disk. Throws ValueError for content that cannot be saved,
// c10::Error for system errors; the previous checkpoint is loadable then.
TRIREME_API int64_t save_checkpoint(const SaveCheckpointRequest& request,
                                    const CheckpointRanks& ranks);

// Returns "Float of sizes [2, 3]".
std::string describe(at::ScalarType dtype, at::IntArrayRef sizes);
// Returns the text of every rank, by rank; see comm/gather_texts.h. Collective.
std::vector<std::string> gather_texts(const std::string& own, const CheckpointRanks& ranks);

// Returns whether any rank has an optimizer: `has` is this rank's answer, `trains` whether it has
// something to train, as ranks may have different stages or no module. Collective. Throws
// ValueError, on all ranks, if one has an optimizer and another one, which trains, has none.
TRIREME_API bool some_rank_has_optimizer(bool has, bool trains, const CheckpointRanks& ranks);

// Collective. Calls `work`; an error that it throws on one rank is raised on all of them.
TRIREME_API void together(const CheckpointRanks& ranks, const std::function<void()>& work);

}  // namespace trireme
