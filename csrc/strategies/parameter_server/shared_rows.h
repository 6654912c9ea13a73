#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/options.h>
#include <trireme/strategies/parameter_server/row_plan.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <cstdint>
#include <memory>

namespace trireme::ps {

// Is the memory of a sparse table, which all ranks of the host map.
struct SharedRows {
  RowPlan plan;
  std::shared_ptr<const shm::Segment> segment;
  std::shared_ptr<const void> keeps;  // forked children write copies of their own
};

// Collective: rank 0 makes it and reserves what a table without rows needs; the others open it.
// Throws DistBackendError on all ranks where one cannot.
SharedRows share_rows(const TableSpec& table, int64_t workers, const Options& options,
                      Communicator& communicator);

}  // namespace trireme::ps
