#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_source.h>
#include <trireme/saving/trained_module.h>

namespace trireme {

// The kind of tensors that rounds add to a checkpoint: what each worker has of its own, and where
// the rounds are.
constexpr const char* kRoundsTensors = "rounds";

// Rounds between workers, each of which trains its own parameters for some steps (LocalSGD,
// DiLoCo).
class TRIREME_API HoldsRounds {
 public:
  virtual ~HoldsRounds() = default;
  // Puts what workers have agreed on in place of the parameters in `content`, which is that of
  // `trained` without its optimizer, and adds what each worker has. Collective over all workers.
  virtual void add_to(CheckpointContent& content, const TrainedModule& trained,
                      const CheckpointRanks& ranks) = 0;
  // Loads module, optimizer and rounds. Collective over all workers. Throws what load_checkpoint()
  // does.
  virtual void load(const CheckpointSource& source, const TrainedModule& trained,
                    const CheckpointRanks& ranks) = 0;
};

}  // namespace trireme
