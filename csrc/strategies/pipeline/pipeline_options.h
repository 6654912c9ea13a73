#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/skip.h>

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

struct PipelineOptions {
  // Whether stages lie on ranks. If not, all are in this process, which needs no Context: ranks
  // of the schedule are `threads` threads (threads/pipeline_threads.h); 0: as many as `devices`, as
  // `balance` has stages, or, without these, as ATen has threads, and at most one per layer.
  bool ranks = true;
  int64_t threads = 0;
  // The device of each of these threads, to which the layers of its stages are moved. If empty,
  // each thread has that of its first parameter (devices_of_threads()). The batch is moved to the
  // first one, targets to that of the last stage.
  std::vector<c10::Device> devices = {};
  int64_t chunks = 1;                 // micro-batches of a step
  std::vector<int64_t> balance = {};  // layers per stage; as even as can be if empty
  std::string schedule = "gpipe";     // a name (schedule_forms.h), or a table with a line per rank
  std::optional<int64_t> stages_per_rank = {};
  int64_t dim = 0;  // along which batches are cut, as by torch::tensor_split, into `chunks` pieces
  bool scale_grads = true;
  // The number of pipelines: each has as many consecutive ranks, and trains on batches of its own.
  // Gradients are averaged over them (replicas.h).
  int64_t replicas = 1;
  // What gradients become on links between replicas (grad/codes/compression.h); themselves if
  // absent.
  std::optional<Compression> compression = {};
  // The names that layers stash() and pop(): `from` and `to` count layers.
  std::vector<PipelineSkip> skips = {};
  // The micro-batches that are recomputed: "never", "except_last", "always", "auto"
  // (schedule_recomputation.h).
  std::string checkpoint = "never";
  // Whether running statistics of BatchNorm are those of whole batches
  // (strategies/pipeline/deferred_batch_norm.h).
  bool deferred_batch_norm = false;
};

// Makes the schedule that options ask for. Throws ValueError.
TRIREME_API PipelineSchedule schedule_of(const PipelineOptions& options, int64_t ranks);
// The communicators of a rank of several pipelines.
struct PipelineRanks {
  std::shared_ptr<Communicator> communicator;  // the ranks of its pipeline
  std::shared_ptr<Communicator> replicas =
      nullptr;  // the ranks with the same stages; null for one replica
};
// Cuts ranks into as many pipelines as there are replicas. Without ranks there is one, whose
// communicator has no other rank. Collective. Throws ValueError where ranks are left over.
TRIREME_API PipelineRanks ranks_of_replica(std::shared_ptr<Communicator> all,
                                           const PipelineOptions& options);
// Returns how many ranks the schedule of that many layers has. Throws ValueError for options that
// do not fit together.
TRIREME_API int64_t schedule_ranks(const PipelineOptions& options, const PipelineRanks& ranks,
                                   int64_t layers);

// Returns the same skips with stages in place of layers, in the order of pops. Throws ValueError
// for a layer that does not exist, and one that pops before the other stashes.
TRIREME_API std::vector<PipelineSkip> skips_of_stages(std::vector<PipelineSkip> skips,
                                                      const std::vector<int64_t>& bounds);

// Throws ValueError for layers that communicate with ranks that have other stages, or, in one
// process, with any others (SyncBatchNorm).
TRIREME_API void refuse_meetings_in_stages(const torch::nn::Module& layers,
                                           const PipelineOptions& options);

}  // namespace trireme
