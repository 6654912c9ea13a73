#pragma once

#include <trireme/saving/checkpoint_source.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/ddp/ddp.h>

#include <optional>
#include <string>
#include <vector>

namespace trireme {

// What a Ddp's codes of gradients keep from step to step, as tensors of a checkpoint. `prefix`
// comes before names of parameters. Tensors of kCompressionTensors:
//
//   residual:<parameter>    [senders, elements], fp32
//   basis:<parameter>       Q of PowerSGD
//   threshold:<parameter>   [senders], of TopK
//   steps:<prefix><method>  one int64

// Returns what this rank keeps; nothing before the first step.
TRIREME_API std::vector<KeptPart> kept_codes(const Ddp& ddp);

// See HoldsCodes.
TRIREME_API std::optional<std::vector<CheckpointTensor>> codes_to_save(const Ddp& ddp,
                                                                       const std::string& prefix);
TRIREME_API void check_codes(const Ddp& ddp, const CheckpointSource& checkpoint,
                             const std::string& prefix);
TRIREME_API void load_codes(const Ddp& ddp, const CheckpointSource& checkpoint,
                            const std::string& prefix);

// The codes of a C++ module in DistributedDataParallel.
class DdpCodes : public HoldsCodes {
 public:
  std::optional<std::vector<CheckpointTensor>> codes_to_save() const override {
    return trireme::codes_to_save(codes_of(), {});
  }
  void check_codes(const CheckpointSource& checkpoint) const override {
    trireme::check_codes(codes_of(), checkpoint, {});
  }
  void load_codes(const CheckpointSource& checkpoint) override {
    trireme::load_codes(codes_of(), checkpoint, {});
  }

 private:
  virtual const Ddp& codes_of() const = 0;
};

}  // namespace trireme
