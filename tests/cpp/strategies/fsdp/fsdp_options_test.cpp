// What a C++ program says of how its units are sharded, gathered and freed.

#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/comm/subgroups.h>
#include <trireme/saving/module_checkpoint.h>

#include <array>
#include <catch_torch.h>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::fsdp_options_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

int64_t last_dim(const std::string& /*name*/, const at::Tensor& /*parameter*/) { return -1; }

}  // namespace

TEST_CASE("sharded along their last dimension parameters train, are saved and loaded alike") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 4);
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const TemporaryFolder folder;
    std::vector<std::vector<int64_t>> sizes(3);
    const auto found = on_ranks<Values>(3, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, {.communicator = rank.communicator, .shard_dim = last_dim});
      sizes[static_cast<size_t>(rank.where.rank)] =
          model->named_parameters()["first.weight"].sizes().vec();
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 4; ++step) fsdp_step(model, optimizer, step, rank.where);
      save_checkpoint(folder.at("checkpoint"), *model, {.communicator = rank.communicator});
      model->begin_writing();
      for (const at::Tensor& shard : model->parameters()) shard.detach().zero_();
      load_checkpoint(folder.at("checkpoint"), *model, {.communicator = rank.communicator});
      return whole_values(*model, net->parameters());
    });
    for (const auto& shape : sizes) CHECK(shape == std::vector<int64_t>{13, 2});
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("gradients in a dtype of their own arrive in it") {
  const torch::optim::SGDOptions options = torch::optim::SGDOptions(0.1).momentum(0.9);
  const Values expected = train_alone<torch::optim::SGD>(options, 4);
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    std::vector<int64_t> doubles(2, 0);
    std::vector<std::string> errors(2);
    const auto found = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
      const auto place = static_cast<size_t>(rank.where.rank);
      UnevenNet net = net_with_gradients_in(at::kDouble);
      auto model = fully_shard(net, over(rank));
      torch::optim::SGD optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 4; ++step) {
        fsdp_step(model, optimizer, step, rank.where);
        doubles[place] += count_gradients_in(at::kDouble, model->parameters());
      }
      Values values = whole_values(*model, net->parameters());
      model->zero_grad();
      for (const at::Tensor& shard : model->parameters()) shard.set_grad_dtype(at::kFloat);
      errors[place] = error_of<c10::Error>(
          [&] { model->forward(part_of_batch(0, rank.where), true).backward(); });
      return values;
    });
    CHECK(doubles == std::vector<int64_t>(2, 7 + 5 + 7 + 5));
    for (const std::string& error : errors)
      CHECK_THAT(error, Catch::Contains("with a grad_dtype of Float since it was sharded"));
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("a dimension that a parameter has not got") {
  const auto errors = on_shm_ranks<std::string>(2, [](ThreadRank& rank) {
    const auto second = [](const std::string&, const at::Tensor&) { return int64_t{1}; };
    return error_of<c10::ValueError>([&] {
      fully_shard(Linear(4, 4), {.communicator = rank.communicator, .shard_dim = second});
    });
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, Catch::Contains("[fully_shard] got dimension 1 for 'bias', which has 1"));
}

TEST_CASE("memory of gathers and gradients comes from where the program says") {
  std::vector<std::array<int64_t, 2>> taken(2);
  const auto found = on_ranks<Values>(2, Engine::kGloo, [&](ThreadRank& rank) {
    const auto counting = [](int64_t& bytes) {
      return [&bytes](int64_t wanted) {
        bytes += wanted;
        return c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(wanted));
      };
    };
    auto& [gathered, gradients] = taken[static_cast<size_t>(rank.where.rank)];
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    model->set_memory_sources(counting(gathered), counting(gradients));
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    for (int64_t step = 0; step < 4; ++step) fsdp_step(model, optimizer, step, rank.where);
    return whole_values(*model, net->parameters());
  });
  const Values expected = train_alone<AdamW>(AdamWOptions(0.01), 4);
  for (const size_t rank : {0, 1}) {
    CHECK(count_unlike(found[rank], expected) == 0);
    CHECK(taken[rank][0] > 0);
    CHECK(taken[rank][1] > 0);
  }
}

TEST_CASE("gradients are scattered by a collective of the program's") {
  std::vector<int64_t> calls(2);
  const auto found = on_ranks<Values>(2, Engine::kGloo, [&](ThreadRank& rank) {
    const std::shared_ptr<Communicator> inner = duplicate(*rank.communicator);
    const auto scatters = std::make_shared<CustomCommunicator>(inner);
    int64_t& count = calls[static_cast<size_t>(rank.where.rank)];
    const auto allocate = [](int64_t numel, at::ScalarType dtype, c10::Device device) {
      return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
    };
    const auto start = [&count, inner](const at::Tensor& output, const at::Tensor& input) {
      ++count;
      inner->reduce_scatter({output}, {input}, ReduceOp::kSum, "of the program").wait();
      return std::shared_ptr<c10d::Work>();
    };
    scatters->set_reduce_scatter(
        {allocate, [start](at::Tensor output, at::Tensor input) { return start(output, input); }});
    UnevenNet net;
    auto model = fully_shard(net, {.communicator = rank.communicator, .scatters_with = scatters});
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    for (int64_t step = 0; step < 3; ++step) fsdp_step(model, optimizer, step, rank.where);
    return whole_values(*model, net->parameters());
  });
  const Values expected = train_alone<AdamW>(AdamWOptions(0.01), 3);
  for (const size_t rank : {0, 1}) {
    CHECK(count_unlike(found[rank], expected) == 0);
    CHECK(calls[rank] >= 3);
  }
}

TEST_CASE("when units are whole is said before and while a model trains") {
  std::vector<std::string> seen(2);
  on_ranks<bool>(2, Engine::kGloo, [&](ThreadRank& rank) {
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    std::string& text = seen[static_cast<size_t>(rank.where.rank)];
    const auto look = [&] { text += has_memory(*net->first) ? 'w' : '-'; };
    const auto train = [&](int64_t step) {
      const at::Tensor loss = model->forward(part_of_batch(step, rank.where));
      look();
      loss.backward();
      look();
    };
    train(0);  // an outermost unit stays whole in between
    model->set_reshard_after_forward(true);
    train(1);
    model->set_reshard_after_backward(false);
    train(2);
    model->set_reshard_after_backward(true);
    model->reshard();
    look();
    model->begin_unshard();
    look();
    model->unshard();
    model->reshard();
    look();
    return true;
  });
  for (const std::string& text : seen)
    CHECK(text ==
          "w---"
          "-w"
          "-w-");
}

}  // namespace trireme::fsdp_options_test
