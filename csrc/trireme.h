#pragma once

// Everything a C++ program needs.
#include <trireme/activation/checkpoint.h>
#include <trireme/activation/checkpoint_plan.h>
#include <trireme/activation/checkpoint_sequential.h>
#include <trireme/activation/partition.h>
#include <trireme/comm/all_mean.h>
#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/comm/group_memory.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/comm/launch/ranks.h>
#include <trireme/comm/subgroups.h>
#include <trireme/grad/flat_optimizer.h>
#include <trireme/grad/grad_norm.h>
#include <trireme/grad/join.h>
#include <trireme/memory/memory_estimate.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/data_parallel/data_parallel.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/fsdp/fully_shard.h>
#include <trireme/strategies/pipeline/partition.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_lowering.h>
#include <trireme/strategies/sync_batch_norm/sync_batch_norm_module.h>
#include <trireme/strategies/zero/zero_redundancy_optimizer.h>
