#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/schedule.h>

#include <vector>

namespace trireme {

// Compares what the ranks of a pipeline were given, and then what its replicas were given, with
// names, dtypes and sizes of parameters and buffers. Collective over the communicator, and over
// options.replicas if there are any. Throws ValueError on all ranks of all replicas where they
// differ, or one of them cannot use what it was given.
void agree_on_pipeline(const PipelineSchedule& schedule,
                       const std::vector<PipelineStageRequest>& stages,
                       const PipelineEngineOptions& options, Communicator& communicator);

}  // namespace trireme
