#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/saving/trained_module.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>

namespace trireme {

// Brings the parameters and buffers of one module, and the state of its optimizer, into another one
// of the same names, in memory, whatever strategies and ranks both have:
//
//   auto after = trireme::fully_shard(Net());
//   trireme::optim::AdamW stepping(after->parameters(), options);
//   trireme::redistribute({&ddp, &optimizer}, {after.get(), &stepping});
//
// It is save_checkpoint() and load_checkpoint() without a file: what these take and refuse, this
// does, and it fails alike. Of buffers the lowest rank's that has them count. A rank that holds
// nothing before passes no module as `source`, one that gets nothing none as `target`: a target of
// fewer ranks, or of more. Modules are different objects; `source` is not changed.
//
// Collective over `communicator`, by default the ranks of the last trireme::init(), which are those
// of both modules. Each element comes from one rank that holds it, by redistribute.h; a rank takes
// no more than both modules and 80 MiB of messages.
TRIREME_API void redistribute(const TrainedModule& source, const TrainedModule& target,
                              std::shared_ptr<Communicator> communicator = nullptr);

}  // namespace trireme
