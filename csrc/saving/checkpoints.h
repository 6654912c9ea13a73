#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/saving/global_batch.h>
#include <trireme/saving/pending_save.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

struct CheckpointsOptions {
  int64_t every = 0;               // how many steps lie between two checkpoints
  int64_t keep = 2;                // how many stay
  bool asynchronous = true;        // see SaveCheckpointOptions
  GlobalBatch* batches = nullptr;  // whose next step is kept; outlives the Checkpoints
  // Whether a save that has failed is logged on rank 0, and training goes on; else it throws at the
  // next call.
  bool logs_errors = false;
  // The ranks that save and load; null: those of the Pipeline, or of the last trireme::init().
  std::shared_ptr<Communicator> communicator = nullptr;
};

// What load_latest() has found.
struct LoadedStep {
  int64_t step = 0;   // so many steps are done
  std::string extra;  // a JSON object
  std::string path;
  // What is not as it was saved: checkpoints that gave way to older ones, random numbers that begin
  // anew.
  std::vector<std::string> warnings = {};
};

// The checkpoints of a run: one every so many steps, of which the last ones stay. Python's class of
// this name has the same folders.
//
//   trireme::GlobalBatch batches({.rows = rows, .size = 256});
//   trireme::Checkpoints saves("run", *net, &optimizer, {.every = 100, .batches = &batches});
//   const auto start = saves.load_latest();
//   for (int64_t step = start ? start->step : 0; step < 10'000; ++step) {
//     const trireme::BatchPart part = batches.part(step);
//     ...
//     saves.step(step + 1);
//   }
//   saves.wait();
//
// See [Note: numbered checkpoints] in checkpoint_series.h. The states of torch's random generators,
// of the CPU and of the device of the ranks, are kept; as many ranks as before go on bit for bit.
// All ranks call all methods; errors are those of save_checkpoint() and load_checkpoint(). Module
// and optimizer outlive it.
class TRIREME_API Checkpoints {
 public:
  // Throws ValueError for every < 1 or keep < 1, and for a folder that is none, or that another
  // Checkpoints of this rank has.
  Checkpoints(const std::string& folder, torch::nn::Module& module,
              torch::optim::Optimizer* optimizer, CheckpointsOptions options);
  ~Checkpoints();

  // Says that `n` steps are done; saves if `every` divides n. `extra` is the text of a JSON object.
  std::optional<PendingSave> step(int64_t n, const std::string& extra = {});
  // Saves after n steps, in any case. Nothing where it has failed and failures are logged.
  std::optional<PendingSave> save(int64_t n, const std::string& extra = {});
  // Returns when the last save is durable.
  void wait();
  // Loads the newest checkpoint that is whole; nothing where there is none yet. Collective. Throws
  // ValueError if there are some, but none is whole, or for one of another module, optimizer or
  // batch.
  std::optional<LoadedStep> load_latest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace trireme
