// A server saved and loaded; a module of another strategy that loads what a server has saved.

#include <trireme/saving/module_checkpoint.h>

#include <strategies/parameter_server/sparse_rows.h>
#include <temporary_folder.h>

namespace trireme::server_checkpoint_test {

using namespace trireme::test;

namespace {

std::vector<ps::TableSpec> tables(const torch::nn::Sequential& net) {
  return {ps::dense("net", net, ps::AdamW{.lr = 0.01}),
          ps::sparse("items", kDim, ps::Adagrad{.lr = 0.1}, {.init = ps::Normal{1}})};
}

void train(ps::ParameterServer& server, const torch::nn::Sequential& net, int64_t worker,
           int64_t from, int64_t to) {
  for (int64_t clock = from; clock < to; ++clock) {
    server.dense("net").pull();
    set_gradients(net->parameters(), drawn_gradients(net->parameters(), worker, clock));
    server.dense("net").push();
    server.sparse("items").push(at::tensor(Ids{clock, worker}),
                                drawn_gradients({at::zeros({2, kDim})}, worker, clock)[0]);
    if (clock == 1 && worker == 1) server.sparse("items").set_lr(0.3);
    server.clock();
  }
  server.dense("net").pull();
}

Values values_of(ps::ParameterServer& server, const torch::nn::Sequential& net) {
  Values all = copies_of(net->parameters());
  all.push_back(server.sparse("items").pull(at::arange(-2, 12)));
  all.push_back(server.sparse("items").ids().clone());
  return all;
}

bool equal(const Values& one, const Values& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
}

}  // namespace

TEST_CASE("a server goes on from what it saved, bit for bit") {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/server";
  const auto expected = on_workers<Values>(2, [&](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, tables(net));
    train(server, net, rank.where.rank, 0, 4);
    server.save(path);
    train(server, net, rank.where.rank, 4, 8);
    return values_of(server, net);
  });
  const auto found = on_workers<Values>(2, [&](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, tables(net));
    train(server, net, rank.where.rank, 0, 1);  // load() forgets it
    server.load(path);
    train(server, net, rank.where.rank, 4, 8);
    return values_of(server, net);
  });
  for (size_t rank = 0; rank < 2; ++rank) CHECK(equal(found[rank], expected[rank]));
}

TEST_CASE("a module without a server loads a dense table") {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/server";
  const auto expected = on_workers<Values>(2, [&](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, tables(net));
    train(server, net, rank.where.rank, 0, 3);
    server.save(path);
    return copies_of(net->parameters());
  });
  const auto found = on_workers<Values>(1, [&](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    load_checkpoint(path, *net, {.communicator = rank.communicator});
    return copies_of(net->parameters());
  });
  CHECK(equal(found[0], expected[0]));
}

}  // namespace trireme::server_checkpoint_test
