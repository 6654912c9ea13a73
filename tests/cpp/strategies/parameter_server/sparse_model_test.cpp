// Random operations on a sparse table, against a model in one dictionary.

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <strategies/parameter_server/sparse_rows.h>

namespace trireme::sparse_model_test {

using namespace trireme::test;

namespace {

using Model = std::map<int64_t, at::Tensor>;

// What one worker does in one clock, drawn of its number and the clock, so that every worker knows
// what the others do.
struct Operation {
  enum Kind { kPull, kLook, kPush } kind;
  Ids ids;
  at::Tensor gradients;  // whole numbers
};

std::vector<Operation> draw_clock(int64_t worker, int64_t clock, int64_t operations) {
  std::mt19937_64 drawn(static_cast<uint64_t>(1000 * worker + clock));
  // Ids at both ends, and more than fit into the first index.
  const auto draw_id = [&]() -> int64_t {
    switch (drawn() % 8) {
      case 0:
        return std::numeric_limits<int64_t>::min() + static_cast<int64_t>(drawn() % 3);
      case 1:
        return std::numeric_limits<int64_t>::max() - static_cast<int64_t>(drawn() % 3);
      case 2:
        return static_cast<int64_t>(drawn());
      default:
        return static_cast<int64_t>(drawn() % 60) - 30;
    }
  };
  std::vector<Operation> all;
  for (int64_t i = 0; i < operations; ++i) {
    Operation operation{static_cast<Operation::Kind>(drawn() % 3), {}, {}};
    for (uint64_t k = drawn() % 6; k > 0; --k) operation.ids.push_back(draw_id());
    std::vector<float> gradients(operation.ids.size() * kDim);
    for (float& value : gradients)
      value = static_cast<float>(static_cast<int64_t>(drawn() % 17)) - 8;
    operation.gradients =
        at::tensor(gradients).view({static_cast<int64_t>(operation.ids.size()), kDim});
    all.push_back(std::move(operation));
  }
  return all;
}

// Whole numbers add up to the same in any order.
void push_into(Model& sums, const Operation& push) {
  for (size_t i = 0; i < push.ids.size(); ++i) {
    const at::Tensor gradient = push.gradients[static_cast<int64_t>(i)];
    auto [sum, is_new] = sums.try_emplace(push.ids[i], gradient);
    if (!is_new) sum->second = sum->second + gradient;
  }
}

void add_to(Model& rows, const Model& sums, const ps::SparseOptions& options) {
  for (const auto& [id, sum] : sums) {
    auto [row, is_new] = rows.try_emplace(id);
    row->second = (is_new ? first_values(options, id) : row->second) + sum;
  }
}

at::Tensor rows_of(const Model& model, const Ids& ids, const ps::SparseOptions& options) {
  at::Tensor rows = at::empty({static_cast<int64_t>(ids.size()), kDim});
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = model.find(ids[i]);
    rows[static_cast<int64_t>(i)] =
        row != model.end() ? row->second : first_values(options, ids[i]);
  }
  return rows;
}

constexpr int64_t kWorkers = 4;
constexpr int64_t kClocks = 50;
constexpr int64_t kOperations = 50;

// Returns "", or what was wrong first.
std::string run_bsp(ThreadRank& rank) {
  const ps::SparseOptions options = {
      .init = ps::Normal{1}, .seed = 7, .reduction = ps::Reduction::kSum};
  ps::ParameterServer server(rank.communicator, {items(ps::Sum{}, options)});
  ps::SparseTable& table = server.sparse("items");
  Model model;
  std::set<int64_t> own;  // rows that this worker has made
  for (int64_t clock = 0; clock < kClocks; ++clock) {
    for (const Operation& operation : draw_clock(rank.where.rank, clock, kOperations)) {
      if (operation.kind == Operation::kPush) {
        table.push(to_ids(operation.ids), operation.gradients);
        own.insert(operation.ids.begin(), operation.ids.end());
        continue;
      }
      const bool creates = operation.kind == Operation::kPull;
      if (creates) own.insert(operation.ids.begin(), operation.ids.end());
      if (!table.pull(to_ids(operation.ids), creates).equal(rows_of(model, operation.ids, options)))
        return "rows differ at clock " + std::to_string(clock);
    }
    const at::Tensor known = table.ids();
    const auto* begin = known.const_data_ptr<int64_t>();
    const auto* end = begin + known.numel();
    if (!std::includes(begin, end, own.begin(), own.end())) return "ids() lacks rows";
    server.clock();
    Model sums;
    for (int64_t worker = 0; worker < kWorkers; ++worker)
      for (const Operation& operation : draw_clock(worker, clock, kOperations))
        if (operation.kind == Operation::kPush) push_into(sums, operation);
    add_to(model, sums, options);
  }
  return {};
}

std::string run_at_once(ThreadRank& rank, ps::Mode mode) {
  const ps::SparseOptions options = {.init = ps::Uniform{0.5}, .seed = 3};
  ps::ParameterServer server(rank.communicator, {items(ps::Sum{}, options)},
                             {.mode = mode, .staleness = mode == ps::Mode::kSsp ? 2 : 0});
  ps::SparseTable& table = server.sparse("items");
  Model sums;
  std::set<int64_t> made;
  for (int64_t clock = 0; clock < kClocks; ++clock) {
    for (const Operation& operation : draw_clock(rank.where.rank, clock, kOperations)) {
      if (operation.kind == Operation::kPush) {
        table.push(to_ids(operation.ids), operation.gradients);
      } else {
        table.pull(to_ids(operation.ids), operation.kind == Operation::kPull);
      }
    }
    server.clock();
    for (int64_t worker = 0; worker < kWorkers; ++worker) {
      for (const Operation& operation : draw_clock(worker, clock, kOperations)) {
        if (operation.kind == Operation::kPush) push_into(sums, operation);
        if (operation.kind != Operation::kLook)
          made.insert(operation.ids.begin(), operation.ids.end());
      }
    }
  }
  rank.communicator->barrier("all have pushed").wait();
  const Ids all(made.begin(), made.end());
  const auto rows = static_cast<int64_t>(all.size());
  if (!table.ids().equal(to_ids(all)) || table.size() != rows) return "ids() differ";
  Model model;
  add_to(model, sums, options);
  // First values are no whole numbers, and workers add theirs in any order.
  if (!at::allclose(table.pull(to_ids(all)), rows_of(model, all, options), 1e-5, 1e-4))
    return "rows differ";
  return {};
}

}  // namespace

TEST_CASE("sparse: 10,000 random operations under bsp are those of one dictionary") {
  for (const std::string& wrong : on_workers<std::string>(kWorkers, run_bsp)) CHECK(wrong == "");
}

TEST_CASE("sparse: 10,000 random operations at once leave the sums of one dictionary") {
  for (const ps::Mode mode : {ps::Mode::kSsp, ps::Mode::kAsync}) {
    const auto wrongs = on_workers<std::string>(
        kWorkers, [&](ThreadRank& rank) { return run_at_once(rank, mode); });
    for (const std::string& wrong : wrongs) CHECK(wrong == "");
  }
}

}  // namespace trireme::sparse_model_test
