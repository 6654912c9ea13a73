#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <vector>

namespace trireme::ps {

// Compares the ranks' tables and options, and checks them. Collective, also for a rank whose part
// is wrong. Throws ValueError on all ranks, naming table and rank.
TRIREME_API void agree_on_tables(const std::vector<TableSpec>& tables, const Options& options,
                                 Communicator& communicator);

}  // namespace trireme::ps
