#include <trireme/saving/module_checkpoint.h>

#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/saving/module_content.h>
#include <trireme/saving/module_save.h>

#include <utility>

namespace trireme {

PendingSave save_checkpoint(const std::string& path, const torch::nn::Module& module,
                            const SaveCheckpointOptions& options) {
  // Nothing of the module is changed.
  return save_module(
      {path, {const_cast<torch::nn::Module*>(&module), options.optimizer}, options, {}});
}

std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                            const LoadCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator, plain_module(module));
  const CheckpointReader reader(path, ranks,
                                {options.read_once, options.verify ? Verify::kYes : Verify::kNo});
  const TrainedModule trained{&module, options.optimizer};
  if (options.rounds != nullptr) {
    reader.verify({kRoundsTensors});
    options.rounds->load(reader, trained, ranks);
  } else {
    load_content(reader, trained, LoadedOn::kAllRanks, ranks);
  }
  return reader.text(kExtraText);
}

}  // namespace trireme
