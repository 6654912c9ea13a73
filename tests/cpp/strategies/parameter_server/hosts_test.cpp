// A server over hosts: which host keeps what, what they say to each other, and training on hosts
// that are pretended, with the bits of one host.

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/strategies/parameter_server/hosts/shard_messages.h>
#include <trireme/strategies/parameter_server/hosts/table_shares.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <strategies/parameter_server/ps_ranks.h>
#include <thread>
#include <vector>

namespace trireme::ps_hosts_test {

using namespace trireme::test;

namespace {

ParameterInfo info_of(const std::string& name, std::vector<int64_t> sizes) {
  ParameterInfo info;
  info.name = name;
  info.numel = c10::multiply_integers(sizes);
  info.sizes = std::move(sizes);
  return info;
}

// Runs each rank r on a thread, which is on host `hosts[r]`.
std::vector<Values> on_hosts(const std::string& hosts,
                             const std::function<Values(ThreadRank&)>& rank_main) {
  std::vector<Values> results(hosts.size());
  std::vector<ThreadRank> ranks(hosts.size());  // alive until all have ended
  std::vector<std::string> errors(hosts.size());
  std::vector<std::thread> threads;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (size_t r = 0; r < hosts.size(); ++r) {
    threads.emplace_back([&, r] {
      errors[r] = error_of([&] {
        ranks[r].where = {static_cast<int64_t>(r), static_cast<int64_t>(hosts.size())};
        ranks[r].group = make_shm_group(store, ranks[r].where,
                                        {.timeout = std::chrono::seconds(30),
                                         .connect_timeout = std::chrono::seconds(30),
                                         .hostname = "127.0.0.1",
                                         .host_partition = hosts.substr(r, 1)});
        ranks[r].communicator = make_communicator(ranks[r].group, store);
        results[r] = rank_main(ranks[r]);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "no error");
  return results;
}

// Trains three clocks under bsp; returns the values that this worker sees then.
Values train(ThreadRank& rank, const std::vector<int64_t>& servers) {
  torch::nn::Sequential net = two_layers();
  ps::ParameterServer server(
      rank.communicator,
      {ps::dense("net", net, ps::AdamW{.lr = 0.1}),
       ps::sparse("rows", 3, ps::Adagrad{}, {.init = ps::Normal{1}, .seed = 7})},
      {.servers = {.ranks = servers}});
  if (!server.worker()) {
    server.serve();
    return {};
  }
  const Values parameters = net->parameters();
  const at::Tensor ids = at::arange(20);
  for (int64_t clock = 0; clock < 3; ++clock) {
    server.dense("net").pull();
    const at::Tensor rows = server.sparse("rows").pull(ids);
    set_gradients(parameters, drawn_gradients(parameters, *server.worker(), clock));
    server.dense("net").push();
    server.sparse("rows").push(ids, rows * static_cast<double>(*server.worker() + 1));
    server.clock();
  }
  server.dense("net").pull();
  Values seen = copies_of(parameters);
  seen.push_back(server.sparse("rows").pull(ids));
  seen.push_back(server.sparse("rows").ids());
  return seen;
}

}  // namespace

TEST_CASE("tensors are cut by hosts, rows and size, and every element has one host") {
  const std::vector<ParameterInfo> tensors{info_of("large", {1000, 70}), info_of("bias", {70}),
                                           info_of("flat", {2, 50'000}), info_of("scalar", {}),
                                           info_of("none", {0, 4})};
  const std::vector<ps::TableShare> whole{{0, 0, 0, 1000, true},
                                          {1, 0, 0, 70, true},
                                          {2, 0, 0, 2, true},
                                          {3, 0, 0, 1, true},
                                          {4, 0, 0, 0, true}};
  CHECK((ps::cut_tensors(tensors, 1) == whole));
  const std::vector<ps::TableShare> by_three{
      {0, 0, 0, 333, false}, {0, 1, 333, 333, false}, {0, 2, 666, 334, false}, {1, 0, 0, 70, true},
      {2, 1, 0, 2, true},    {3, 0, 0, 1, true},      {4, 2, 0, 0, true}};
  CHECK((ps::cut_tensors(tensors, 3) == by_three));
}

TEST_CASE("ids are spread evenly over hosts") {
  std::vector<int64_t> kept(3, 0);
  for (int64_t id = -3000; id < 3000; ++id) ++kept[static_cast<size_t>(ps::host_of(id, 3))];
  for (const int64_t count : kept) CHECK(std::abs(count - 2000) < 200);
}

TEST_CASE("messages between hosts are read as they were written, and others are refused") {
  ps::ShareRequest request;
  request.verb = ps::ShareRequest::Verb::kLeave;
  request.table = 3;
  request.ticket = INT64_MAX;
  request.number = 1.0 / 3;
  request.create = false;
  request.state = ps::LineState::kFailed;
  request.word = "a \"word\" of \xff bytes";
  const ps::ShareRequest read = ps::share_request_of(to_text(request));
  CHECK(read.verb == request.verb);
  CHECK(read.table == 3);
  CHECK(read.ticket == INT64_MAX);
  CHECK(read.number == request.number);
  CHECK(!read.create);
  CHECK(read.state == request.state);
  CHECK_THAT(read.word, Catch::Contains("a \"word\" of "));
  const ps::ShareAnswer answer = ps::share_answer_of(to_text(ps::ShareAnswer{7, "no"}));
  CHECK((answer.ticket == 7 && answer.error == "no"));
  for (const char* text : {"", "{}", "[1]", "[1, 2, 3, \"x\", true, 1, \"\"]", "\xff"})
    CHECK_THAT(error_of([&] { ps::share_request_of(text); }),
               Catch::Contains("[ps] got a message between hosts of another form"));
}

TEST_CASE("training over hosts has the bits of one host") {
  const auto train_on = [](const std::string& hosts, const std::vector<int64_t>& servers) {
    return on_hosts(hosts, [&](ThreadRank& rank) { return train(rank, servers); });
  };
  const auto check_equal = [](const std::vector<Values>& of_ranks, const Values& expected) {
    for (const Values& seen : of_ranks)
      for (size_t i = 0; i < seen.size(); ++i) CHECK(at::equal(seen[i], expected.at(i)));
  };
  const Values of_two = train_on("aaaa", {1, 3})[0];
  REQUIRE(of_two.size() == 6);
  check_equal(train_on("aabb", {1, 3}), of_two);
  check_equal(train_on("abba", {1, 3}), of_two);
  // Two hosts have no worker.
  const Values of_one = train_on("aa", {1})[0];
  check_equal(train_on("aabc", {1, 2, 3}), of_one);
}

}  // namespace trireme::ps_hosts_test
