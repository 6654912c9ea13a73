// Sparse tables: what a row begins with, how it is read and stepped.

#include <map>
#include <strategies/parameter_server/sparse_rows.h>

namespace trireme::sparse_test {

using namespace trireme::test;

// --- what a row is -------------------------------------------------------------------------------

TEST_CASE("sparse: a row begins as a function of its seed and id alone") {
  const ps::SparseOptions options = {.init = ps::Normal{0.1}, .seed = 11};
  const auto sums = on_workers<at::Tensor>(3, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::SGD{}, options)},
                               {.mode = ps::Mode::kAsync});
    ps::SparseTable& table = server.sparse("items");
    // Each in an order of its own, over several levels of the index.
    at::Tensor order = at::arange(20000) * 7919 % 20011;
    if (rank.where.rank == 1) order = order.flip(0);
    for (const at::Tensor& some : order.split(777)) table.pull(some);
    rank.communicator->barrier("all rows are there").wait();
    return table.pull(table.ids());
  });
  const at::Tensor ids = std::get<0>((at::arange(20000) * 7919 % 20011).sort());
  CHECK(sums[0].size(0) == 20000);
  CHECK(sums[0].equal(sums[1]));
  CHECK(sums[0].equal(sums[2]));
  for (int64_t i = 0; i < 20000; i += 997)
    CHECK(sums[0][i].equal(first_values(options, ids[i].item<int64_t>())));
}

TEST_CASE("sparse: what is drawn has the spread that was asked for, in every dtype") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto all = [&](ps::RowInit init) {
      std::vector<at::Tensor> rows;
      for (int64_t id = -300; id < 300; ++id)
        rows.push_back(first_values({.init = init, .seed = 1, .dtype = dtype}, id, 129));
      return at::stack(rows).to(at::kDouble);
    };
    const at::Tensor normal = all(ps::Normal{2});
    CHECK(std::abs(normal.mean().item<double>()) < 0.05);
    CHECK(std::abs(normal.std().item<double>() - 2) < 0.05);
    const at::Tensor uniform = all(ps::Uniform{3});
    CHECK(uniform.abs().max().item<double>() <= 3);
    CHECK(std::abs(uniform.std().item<double>() - 3 / std::sqrt(3.)) < 0.05);
    CHECK(all(ps::Zeros{}).abs().max().item<double>() == 0);
    CHECK_FALSE(first_values({.init = ps::Normal{1}, .seed = 1}, 5)
                    .equal(first_values({.init = ps::Normal{1}, .seed = 2}, 5)));
    CHECK_FALSE(first_values({.init = ps::Normal{1}, .seed = 1}, 5)
                    .equal(first_values({.init = ps::Normal{1}, .seed = 1}, -5)));
  }
}

TEST_CASE("sparse: a row that is pulled is never a mixture of two states") {
  constexpr int64_t kWide = 300;
  const auto mixtures = on_workers<int64_t>(3, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {ps::sparse("items", kWide, ps::Sum{})},
                               {.mode = ps::Mode::kAsync});
    ps::SparseTable& table = server.sparse("items");
    const at::Tensor ids = at::tensor(Ids{1, 2, 3});
    int64_t mixed = 0;
    for (int64_t i = 0; i < 2000; ++i) {
      table.push(ids, at::ones({3, kWide}));
      const at::Tensor rows = table.pull(ids);
      mixed += rows.ne(rows.select(1, 0).unsqueeze(1)).any(1).sum().item<int64_t>();
    }
    rank.communicator->barrier("all have pushed").wait();
    return mixed + table.pull(ids).ne(3 * 2000).sum().item<int64_t>();
  });
  for (const int64_t mixed : mixtures) CHECK(mixed == 0);
}

// --- optimizers ----------------------------------------------------------------------------------

namespace {

using Model = std::map<int64_t, at::Tensor>;

// A worker pushes these ids in a clock: some twice, some by one worker only.
Ids pushed_ids(int64_t worker, int64_t clock) {
  return {clock % 3, 10 + worker, clock % 3, 20 + clock % 2, -worker};
}

at::Tensor pushed_gradients(int64_t worker, int64_t clock) {
  return drawn_gradients({at::zeros({5, kDim})}, worker, clock)[0];
}

at::Tensor through_table(ThreadRank& rank, const ps::Optimizer& optimizer, at::ScalarType dtype,
                         ps::Reduction reduction) {
  ps::ParameterServer server(
      rank.communicator,
      {items(optimizer, {.init = ps::Normal{1}, .dtype = dtype, .reduction = reduction})});
  ps::SparseTable& table = server.sparse("items");
  for (int64_t clock = 0; clock < 7; ++clock) {
    table.push(to_ids(pushed_ids(rank.where.rank, clock)),
               pushed_gradients(rank.where.rank, clock));
    server.clock();
  }
  return table.pull(at::arange(-4, 24));
}

// Each row is a parameter with an optimizer of its own, which steps when the row is pushed.
template <typename Torch, typename TorchOptions>
at::Tensor row_by_row(int64_t workers, const TorchOptions& options, ps::Reduction reduction) {
  struct Row {
    at::Tensor values;
    std::unique_ptr<Torch> optimizer;
  };
  std::map<int64_t, Row> rows;
  for (int64_t id = -4; id < 24; ++id) {
    at::Tensor values = first_values({.init = ps::Normal{1}}, id);
    rows[id] = {values, std::make_unique<Torch>(std::vector<at::Tensor>{values}, options)};
  }
  for (int64_t clock = 0; clock < 7; ++clock) {
    Model sums;
    for (int64_t worker = 0; worker < workers; ++worker) {
      const Ids ids = pushed_ids(worker, clock);
      const at::Tensor gradients = pushed_gradients(worker, clock);
      Model own;
      for (size_t i = 0; i < ids.size(); ++i) {
        const at::Tensor gradient = gradients[static_cast<int64_t>(i)];
        auto [sum, is_new] = own.try_emplace(ids[i], gradient);
        if (!is_new) sum->second = sum->second + gradient;
      }
      for (const auto& [id, gradient] : own) {
        auto [sum, is_new] = sums.try_emplace(id, gradient);
        if (!is_new) sum->second = sum->second + gradient;
      }
    }
    for (const auto& [id, sum] : sums) {
      Row& row = rows.at(id);
      row.values.mutable_grad() =
          reduction == ps::Reduction::kMean ? sum / static_cast<double>(workers) : sum.clone();
      row.optimizer->step();
    }
  }
  std::vector<at::Tensor> values;
  for (const auto& [id, row] : rows) values.push_back(row.values);
  return at::stack(values);
}

template <typename Torch, typename TorchOptions>
void check_optimizer(const ps::Optimizer& optimizer, const TorchOptions& options) {
  for (const int64_t workers : {1, 2, 3}) {
    for (const ps::Reduction reduction : {ps::Reduction::kMean, ps::Reduction::kSum}) {
      CAPTURE(to_string(optimizer), workers);
      const auto found = on_workers<at::Tensor>(workers, [&](ThreadRank& rank) {
        return through_table(rank, optimizer, at::kFloat, reduction);
      });
      const at::Tensor expected = row_by_row<Torch>(workers, options, reduction);
      CHECK(at::allclose(found[0], expected, 1e-5, 1e-6));
      for (const at::Tensor& rows : found) CHECK(rows.equal(found[0]));
    }
  }
}

}  // namespace

TEST_CASE("sparse: each row is stepped by torch's optimizer, and by its own number of steps") {
  using namespace torch::optim;
  check_optimizer<SGD>(ps::SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
                       SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  check_optimizer<Adam>(ps::Adam{.lr = 0.1}, AdamOptions(0.1));
  check_optimizer<AdamW>(ps::AdamW{.lr = 0.1}, AdamWOptions(0.1));
  check_optimizer<Adagrad>(ps::Adagrad{.lr = 0.1}, AdagradOptions(0.1).eps(1e-10));
}

TEST_CASE("sparse: bf16 and fp64 rows follow fp32 ones") {
  for (const ps::Optimizer& optimizer :
       {ps::Optimizer(ps::AdamW{.lr = 0.1}), ps::Optimizer(ps::RowwiseAdagrad{.lr = 0.1})}) {
    const auto run = [&](at::ScalarType dtype) {
      return on_workers<at::Tensor>(2, [&](ThreadRank& rank) {
        return through_table(rank, optimizer, dtype, ps::Reduction::kMean);
      })[0];
    };
    const at::Tensor expected = run(at::kFloat);
    CHECK(at::allclose(run(at::kDouble).to(at::kFloat), expected, 1e-4, 1e-4));
    CHECK(at::allclose(run(at::kBFloat16).to(at::kFloat), expected, 0.05, 0.05));
  }
}

TEST_CASE("sparse: rows under ssp are stepped once per push, duplicates added first") {
  const auto found = on_workers<at::Tensor>(1, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::Adagrad{.lr = 1})},
                               {.mode = ps::Mode::kSsp});
    ps::SparseTable& table = server.sparse("items");
    const at::Tensor gradients = at::tensor({1.f, 2.f, 3.f}).view({3, 1}).expand({3, kDim});
    table.push(at::tensor({4, 4, 4}, at::kInt), gradients, 2);
    return table.pull(at::tensor(Ids{4}));
  });
  // One step with 2 * (1 + 2 + 3): the root of its square divides it.
  CHECK(at::allclose(found[0], at::full({1, kDim}, -1.f)));
}

TEST_CASE("sparse: a learning rate holds from its clock on") {
  const auto found = on_workers<at::Tensor>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::SGD{.lr = 1})});
    ps::SparseTable& table = server.sparse("items");
    const at::Tensor id = at::tensor(Ids{3});
    table.push(id, at::ones({1, kDim}));
    server.clock();
    if (rank.where.rank == 1) table.set_lr(0.5);
    table.push(id, at::ones({1, kDim}));
    server.clock();
    return table.pull(id);
  });
  for (const at::Tensor& rows : found) CHECK(rows.equal(at::full({1, kDim}, -1.5f)));
}

TEST_CASE("sparse: with backup workers a late push is dropped") {
  struct Seen {
    at::Tensor rows;
    int64_t dropped;
  };
  const auto found = on_workers<Seen>(3, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::Sum{})}, {.backup = 1});
    ps::SparseTable& table = server.sparse("items");
    const at::Tensor id = at::tensor(Ids{8});
    if (rank.where.rank == 2) rank.communicator->barrier("a clock is committed").wait();
    table.push(id, at::ones({1, kDim}));
    server.clock();
    if (rank.where.rank != 2) {
      table.pull(id);  // waits until the clock is committed
      rank.communicator->barrier("a clock is committed").wait();
    }
    rank.communicator->barrier("the late one has come").wait();
    return Seen{table.pull(id), server.stats().dropped};
  });
  for (size_t worker = 0; worker < 3; ++worker) {
    CHECK(found[worker].rows.equal(at::ones({1, kDim})));
    CHECK(found[worker].dropped == (worker == 2 ? 1 : 0));
  }
}

TEST_CASE("sparse: pushes of one clock may grow, and the next ones take the same memory") {
  const auto bytes = on_workers<std::vector<int64_t>>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::SGD{.lr = 1})});
    ps::SparseTable& table = server.sparse("items");
    std::vector<int64_t> seen;
    for (int64_t clock = 0; clock < 12; ++clock) {
      for (int64_t push = 0; push < 3; ++push) {
        const at::Tensor ids = at::arange(30000);
        table.push(ids, at::ones({30000, kDim}));
      }
      server.clock();
      seen.push_back(server.stats().memory_bytes);
    }
    seen.push_back(table.pull(at::arange(30000)).eq(-36).sum().item<int64_t>());
    return seen;
  });
  CHECK(bytes[0][11] == bytes[0][4]);
  CHECK(bytes[0][12] == 30000 * kDim);
}

}  // namespace trireme::sparse_test
