#include <trireme/strategies/parameter_server/worker_tables.h>

#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/dense_table.h>
#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/sparse_table.h>
#include <trireme/strategies/parameter_server/worker_meeting.h>
#include <trireme/strategies/parameter_server/worker_session.h>

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace trireme::ps {
namespace {

bool lies_on_cpu(const TableSpec& table) {
  return std::all_of(table.tensors.begin(), table.tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.is_cpu(); });
}

constexpr WorkerMeeting::Texts kSavingTexts{
    .at_other_clock = "Call it after as many clocks on all workers.",
    .has_failed = " could not: ",
    .after_failure = "Mend what it says, and call this again on all workers.",
    .has_gone = " has gone while it was at it",
    .after_end = "Call this again on all workers."};

// Lets messages say what a dead worker held, as long as the tables live.
void describe_held(const WorkerTables& made) {
  const std::vector<std::weak_ptr<Table>> tables(made.tables.begin(), made.tables.end());
  made.board->describe_held_by([tables](int64_t worker) {
    std::string held;
    for (const auto& weak : tables)
      if (const auto table = weak.lock(); table != nullptr && held.empty())
        held = table->steps().held_by(worker);
    return held;
  });
}

}  // namespace

std::shared_ptr<HostStore> store_of(const ServerMemory& memory, size_t table) {
  const ServerPlan& plan = memory.plan();
  return HostStore::make(memory.values(table), infos_of(*plan.specs[table]), {0, plan.ranks()});
}

WorkerTables make_host_tables(const HostTablesRequest& request) {
  const at::NoGradGuard no_grad;
  WorkerTables made;
  made.board = request.board;
  made.session = std::make_shared<WorkerSession>(made.board);
  const auto line_of = [board = made.board](int64_t worker) -> MeetingLine& {
    return board->line(worker).saving;
  };
  made.meeting =
      std::make_shared<WorkerMeeting>(WorkerMeeting::Parts{made.board, line_of, kSavingTexts});
  const ServerPlan& plan = request.memory->plan();
  for (size_t i = 0; i < plan.specs.size(); ++i) {
    const TableSpec& spec = *plan.specs[i];
    Table::Spread spread{static_cast<int64_t>(i), plan.layouts[i], request.remote};
    TableSteps::Parts steps{plan.specs[i], made.board, request.memory->table(i), request.memory};
    if (spec.rows) {
      made.tables.push_back(std::make_shared<SparseTable>(
          SparseTable::Parts{std::move(steps), plan.tables[i], request.memory->values(i),
                             plan.rows[i], request.memory, made.session, std::move(spread)}));
    } else {
      const bool binds = request.moves_no_byte && spec.is_module && lies_on_cpu(spec);
      made.tables.push_back(std::make_shared<DenseTable>(DenseTable::Parts{
          std::move(steps), plan.tables[i], store_of(*request.memory, i), made.session, binds,
          std::move(spread), request.whole.empty() ? nullptr : request.whole[i]}));
    }
  }
  describe_held(made);
  return made;
}

void save_together(const WorkerTables& tables, const std::function<void()>& work) {
  ProgressTable& board = *tables.board;
  const WaitContext context{[&board] { return c10::str("save at clock ", board.clock()); }, "save"};
  WorkerMeeting::Plan plan{context};
  plan.at_one_clock = board.options().mode == Mode::kBsp && board.options().backup == 0;
  plan.prepare = [&] {
    for (const auto& table : tables.tables) {
      table->prepare_meeting();
      table->bring_to_committed();
    }
  };
  plan.work = [&] {
    for (const auto& table : tables.tables) table->adopt_learning_rate();
    work();
  };
  tables.meeting->hold(plan);
}

void WorkerTables::clock() {
  // What another thread pushes while one of these waits belongs to this clock, too.
  do {
    for (const auto& table : tables) table->before_clock();
  } while (std::any_of(tables.begin(), tables.end(),
                       [](const auto& table) { return table->has_open_pushes(); }));
  session->move_clock();
  for (const auto& table : tables) table->after_clock();
}

}  // namespace trireme::ps
