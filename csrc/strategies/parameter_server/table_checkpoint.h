#pragma once

#include <trireme/common/error.h>
#include <trireme/strategies/parameter_server/table.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// [Note: a server in a checkpoint]
//
// One worker writes, and one rank per host reads, since the memory of a host holds its whole share.
// The files are those of every checkpoint (saving/checkpoint_files.h):
//
//   model       the values of dense tables, and the buffers of modules, under the plain model's
//               names, so that every other strategy loads them. Where there are several dense
//               tables, the name of the table stands before: "net.0.weight".
//   tables      "net.0.weight.exp_avg" and ".steps" (one per block), "items.ids", ".rows", ".steps"
//               and states of sparse tables, "net.lr"
//   extra.json  the kind of each table, which the loading server compares with its own
//
// A rank that writes or reads takes as much memory again as the largest column of a sparse table:
// its values, or one of its states.
//
// A learning rate is taken from the checkpoint, as by torch's optimizers; other options have to
// match.

using Tables = std::vector<std::shared_ptr<Table>>;

// Called on one worker (load_tables(): on one rank per host) while all others stand still. Throw
// what saving/ throws; load_tables() also ValueError for a checkpoint of other tables. `shares`: of
// all hosts, by table.
void save_tables(const std::string& path, const Tables& tables,
                 const std::vector<SharesByHost>& shares);
void load_tables(const std::string& path, const Tables& tables, RankOf where);
// Reads the data that each worker has of its own: the buffers of its modules.
void load_buffers(const std::string& path, const Tables& tables);

}  // namespace trireme::ps
