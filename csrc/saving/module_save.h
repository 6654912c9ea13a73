#pragma once

#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_series.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/saving/pending_save.h>
#include <trireme/saving/trained_module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Which checkpoint of a series a save is, and what else goes into it.
struct NumberedSave {
  std::shared_ptr<CheckpointSeries> series = nullptr;  // null: it is not one of a series
  int64_t step = 0;
  std::vector<CheckpointTensor> random = {};  // kRandomTensors
  std::function<std::string()> extra = {};    // in place of that of the options; on rank 0
};

// A save of a module and its optimizer.
struct ModuleSave {
  std::string path;
  TrainedModule trained;
  SaveCheckpointOptions options;
  NumberedSave numbered;
};

// Saves, or begins to; see save_checkpoint() in module_checkpoint.h.
PendingSave save_module(const ModuleSave& save);

}  // namespace trireme
