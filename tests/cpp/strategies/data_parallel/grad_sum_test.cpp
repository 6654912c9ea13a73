#include <trireme/strategies/data_parallel/grad_sum.h>

#include <atomic>
#include <catch_torch.h>
#include <memory>
#include <thread>
#include <vector>

namespace trireme::grad_sum_test {

namespace {

// Parameters of a module and leaves for them in each replica, all of one value.
struct Leaves {
  Leaves(size_t replicas, std::vector<at::Tensor> values) : masters(std::move(values)) {
    for (size_t replica = 0; replica < replicas; ++replica) {
      leaves.emplace_back();
      for (const at::Tensor& master : masters)
        leaves.back().push_back(master.detach().requires_grad_(true));
    }
    sum = std::make_unique<GradSum>(leaves);
  }

  std::vector<at::Tensor> masters;
  std::vector<std::vector<at::Tensor>> leaves;  // [replica][parameter]
  std::unique_ptr<GradSum> sum;
};

std::vector<at::Tensor> some_values(int64_t count) {
  std::vector<at::Tensor> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(at::full({3, i + 1}, 1.0 + double(i)));
  return values;
}

// What one replica's loss gives to its leaves.
at::Tensor gradient_of(size_t replica, size_t parameter, const at::Tensor& like) {
  return at::sin(at::arange(like.numel()).view_as(like) + 1.7 * double(replica)) *
         (1.0 + double(parameter));
}

at::Tensor loss_of(const Leaves& net, size_t replica) {
  at::Tensor loss = at::zeros({});
  for (size_t i = 0; i < net.masters.size(); ++i) {
    const at::Tensor& leaf = net.leaves[replica][i];
    loss = loss + (leaf * gradient_of(replica, i, leaf)).sum();
  }
  return loss;
}

std::vector<at::Tensor> expected_of(const Leaves& net, const std::vector<size_t>& replicas) {
  std::vector<at::Tensor> expected;
  for (size_t i = 0; i < net.masters.size(); ++i) {
    at::Tensor sum = gradient_of(replicas.front(), i, net.masters[i]);
    for (size_t place = 1; place < replicas.size(); ++place)
      sum = sum + gradient_of(replicas[place], i, net.masters[i]);
    expected.push_back(sum);
  }
  return expected;
}

std::vector<at::Tensor> run(const Leaves& net, const std::vector<size_t>& replicas) {
  net.sum->begin(replicas, net.masters);
  std::vector<std::thread> threads;
  // They begin at the same time, and nothing else orders them: ThreadSanitizer watches.
  std::atomic<size_t> ready{0};
  for (const size_t replica : replicas)
    threads.emplace_back([&, replica] {
      const at::Tensor loss = loss_of(net, replica);
      ready.fetch_add(1, std::memory_order_relaxed);
      while (ready.load(std::memory_order_relaxed) < replicas.size()) std::this_thread::yield();
      loss.backward();
    });
  for (std::thread& thread : threads) thread.join();
  return net.sum->finish();
}

}  // namespace

TEST_CASE("gradients of all replicas are summed in their order, whoever comes last") {
  const Leaves net(3, some_values(6));
  const std::vector<at::Tensor> expected = expected_of(net, {0, 1, 2});
  for (int round = 0; round < 50; ++round) {
    const std::vector<at::Tensor> sums = run(net, {0, 1, 2});
    REQUIRE(sums.size() == expected.size());
    for (size_t i = 0; i < sums.size(); ++i) CHECK(at::equal(sums[i], expected[i]));
  }
  for (const auto& of_replica : net.leaves)
    for (const at::Tensor& leaf : of_replica) CHECK_FALSE(leaf.grad().defined());
}

TEST_CASE("some replicas only, in the order in which they are named") {
  const Leaves net(3, some_values(4));
  for (const std::vector<size_t>& replicas : {std::vector<size_t>{0}, {2}, {0, 2}, {1, 2}}) {
    const std::vector<at::Tensor> expected = expected_of(net, replicas);
    const std::vector<at::Tensor> sums = run(net, replicas);
    for (size_t i = 0; i < sums.size(); ++i) CHECK(at::equal(sums[i], expected[i]));
  }
}

TEST_CASE("a parameter that only some replicas use, and one that none does") {
  const Leaves net(2, some_values(3));
  net.sum->begin({0, 1}, net.masters);
  (net.leaves[0][0] * 2).sum().backward();
  (net.leaves[1][0] * 3 + net.leaves[1][2].sum()).sum().backward();
  const std::vector<at::Tensor> sums = net.sum->finish();
  CHECK(at::equal(sums[0], at::full_like(sums[0], 5)));
  CHECK_FALSE(sums[1].defined());
  CHECK(at::equal(sums[2], at::full_like(sums[2], 3)));  // once for each of the three of leaf 0
}

TEST_CASE("a gradient that comes again in one backward counts too") {
  const Leaves net(2, some_values(1));
  net.sum->begin({0, 1}, net.masters);
  for (const size_t replica : {0, 1, 0})
    (net.leaves[replica][0] * double(replica + 1)).sum().backward();
  const std::vector<at::Tensor> sums = net.sum->finish();
  CHECK(at::equal(sums[0], at::full_like(sums[0], 4)));
  SECTION("and is forgotten afterwards") {
    CHECK(at::equal(run(net, {0, 1})[0], expected_of(net, {0, 1})[0]));
  }
}

TEST_CASE("gradients that others can see are left as they are") {
  const Leaves net(2, some_values(1));
  const at::Tensor given = at::ones_like(net.masters[0]);
  net.sum->begin({0, 1}, net.masters);
  for (const size_t replica : {0, 1}) {
    const at::Tensor& leaf = net.leaves[replica][0];
    (leaf + 0).backward(given);
  }
  const std::vector<at::Tensor> sums = net.sum->finish();
  CHECK(at::equal(sums[0], at::full_like(given, 2)));
  CHECK(at::equal(given, at::ones_like(given)));
}

TEST_CASE("sparse, complex and 0-dim gradients") {
  const Leaves net(2, {at::ones({4, 2}), at::ones({3}, at::kComplexFloat), at::ones({})});
  net.sum->begin({0, 1}, net.masters);
  for (const size_t replica : {0, 1}) {
    const auto& leaves = net.leaves[replica];
    const at::Tensor rows = at::tensor({int64_t(replica), int64_t{3}});
    const at::Tensor looked_up = at::embedding(leaves[0], rows, -1, false, /*sparse=*/true);
    (looked_up.sum() + at::real(leaves[1]).sum() + leaves[2] * 2).backward();
  }
  const std::vector<at::Tensor> sums = net.sum->finish();
  CHECK(sums[0].is_sparse());
  const at::Tensor expected = at::tensor({1., 1., 1., 1., 0., 0., 2., 2.}, at::kFloat);
  CHECK(at::equal(sums[0].to_dense(), expected.view({4, 2})));
  CHECK(at::equal(sums[1], at::full({3}, 2, at::kComplexFloat)));
  CHECK(sums[2].item<double>() == 4);
}

TEST_CASE("after a cancellation the others' gradients throw, and nothing is left") {
  const Leaves net(2, some_values(2));
  net.sum->begin({0, 1}, net.masters);
  loss_of(net, 0).backward();
  net.sum->cancel();
  CHECK_THROWS_AS(loss_of(net, 1).backward(), GradSum::Cancelled);
  net.sum->drop();
  for (const auto& of_replica : net.leaves)
    for (const at::Tensor& leaf : of_replica) CHECK_FALSE(leaf.grad().defined());
  CHECK(at::equal(run(net, {0, 1})[1], expected_of(net, {0, 1})[1]));
}

TEST_CASE("frozen leaves have no part, until they are trained") {
  const Leaves net(2, some_values(2));
  for (const auto& of_replica : net.leaves) of_replica[0].set_requires_grad(false);
  std::vector<at::Tensor> sums = run(net, {0, 1});
  CHECK_FALSE(sums[0].defined());
  CHECK(sums[1].defined());
  for (const auto& of_replica : net.leaves) of_replica[0].set_requires_grad(true);
  sums = run(net, {0, 1});
  CHECK(at::equal(sums[0], expected_of(net, {0, 1})[0]));
}

TEST_CASE("a leaf that has changed its dtype is listened to again") {
  const Leaves net(2, some_values(1));
  run(net, {0, 1});
  std::vector<at::Tensor> masters = {net.masters[0].to(at::kDouble)};
  for (const auto& of_replica : net.leaves) {
    at::Tensor leaf = of_replica[0];
    leaf.set_data(masters[0].detach());
  }
  net.sum->begin({0, 1}, masters);
  for (const size_t replica : {0, 1}) (net.leaves[replica][0] * 2).sum().backward();
  const std::vector<at::Tensor> sums = net.sum->finish();
  REQUIRE(sums[0].defined());
  CHECK(sums[0].scalar_type() == at::kDouble);
  CHECK(at::equal(sums[0], at::full_like(sums[0], 4)));
}

}  // namespace trireme::grad_sum_test
