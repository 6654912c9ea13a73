#include <trireme/saving/module_checkpoint.h>

#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/saving/module_content.h>

#include <utility>

namespace trireme {

void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const SaveCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator, plain_module(module));
  // Nothing of the module is changed.
  const TrainedModule trained{const_cast<torch::nn::Module*>(&module), options.optimizer};
  CheckpointContent content =
      content_to_save(options.rounds == nullptr ? trained : TrainedModule{trained.module}, ranks);
  if (options.rounds != nullptr) options.rounds->add_to(content, trained, ranks);
  if (!options.extra.empty()) content.texts[kExtraText] = options.extra;
  save_checkpoint({path, content, options.max_file_bytes}, ranks);
}

std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                            const LoadCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator, plain_module(module));
  const CheckpointReader reader(path, ranks, options.read_once);
  const TrainedModule trained{&module, options.optimizer};
  if (options.rounds != nullptr)
    options.rounds->load(reader, trained, ranks);
  else
    load_content(reader, trained, LoadedOn::kAllRanks, ranks);
  return reader.text(kExtraText);
}

}  // namespace trireme
