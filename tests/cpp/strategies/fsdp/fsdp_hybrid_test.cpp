// fully_shard for C++ modules that are sharded among some ranks and replicated over the others
// (HSDP): they train as one process does on the whole batch.

#include <trireme/saving/module_checkpoint.h>

#include <catch_torch.h>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::fsdp_hybrid_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

TEST_CASE("sharded among two of four ranks, over shared memory and Gloo; saved by the first two") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 4);
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const TemporaryFolder folder;
    std::vector<int64_t> sharing(4);
    const auto found = on_ranks<Values>(4, engine, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, {.communicator = rank.communicator, .shard_among = 2});
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 4; ++step) fsdp_step(model, optimizer, step, rank.where);
      sharing[static_cast<size_t>(rank.where.rank)] = model->sharing().rank;
      const SaveCheckpointOptions together{.communicator = rank.communicator};
      save_checkpoint(folder.at("checkpoint"), *model, together);
      return whole_values(*model, net->parameters());
    });
    CHECK(sharing == std::vector<int64_t>{0, 1, 0, 1});
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);

    UnevenNet plain;
    for (const at::Tensor& parameter : plain->parameters()) parameter.detach().zero_();
    on_ranks<bool>(1, Engine::kShm, [&](ThreadRank& rank) {
      load_checkpoint(folder.at("checkpoint"), *plain, {.communicator = rank.communicator});
      return true;
    });
    CHECK(count_unlike(values_of(plain->parameters()), expected) == 0);
  }
}

TEST_CASE("a replica of one rank each is what DDP does, with all ranks it is no replica") {
  const AdamWOptions options(0.01);
  const Values expected = train_alone<AdamW>(options, 3);
  for (const int64_t among : {1, 2}) {
    const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, {.communicator = rank.communicator, .shard_among = among});
      AdamW optimizer(model->parameters(), options);
      for (int64_t step = 0; step < 3; ++step) fsdp_step(model, optimizer, step, rank.where);
      return whole_values(*model, net->parameters());
    });
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("sums that replicas have not averaged yet are added to those that they do") {
  UnevenNet alone;
  AdamW plain(alone->parameters(), AdamWOptions(0.01));
  for (int64_t step = 0; step < 2; ++step) {
    plain.zero_grad();
    for (const int64_t batch : {0, 1})  // the head is used in the first one only
      (alone->forward(whole_batch(2 * step + batch), batch == 0) / 2).backward();
    plain.step();
  }
  const Values expected = values_of(alone->parameters());
  for (const int64_t among : {2, 4}) {  // among 4 there are no replicas
    std::vector<int> had_none(4);
    const auto found = on_shm_ranks<Values>(4, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, {.communicator = rank.communicator, .shard_among = among});
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      model->set_gradient_divide_factor(8);  // 4 ranks, 2 batches
      for (int64_t step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        for (const int64_t batch : {0, 1}) {
          model->set_requires_all_reduce(batch == 1);
          model->forward(part_of_batch(2 * step + batch, rank.where), batch == 0).backward();
          if (batch == 0 && !model->parameters().front().grad().defined())
            ++had_none[static_cast<size_t>(rank.where.rank)];
        }
        trireme::step(optimizer);
      }
      return whole_values(*model, net->parameters());
    });
    CHECK(had_none == std::vector<int>(4, among == 2 ? 2 : 0));
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("gradients of several backwards are averaged when they are asked for") {
  UnevenNet alone;
  AdamW plain(alone->parameters(), AdamWOptions(0.01));
  for (const int64_t batch : {0, 1}) alone->forward(whole_batch(batch), batch == 0).backward();
  plain.step();
  const Values expected = values_of(alone->parameters());
  for (const int64_t among : {1, 2}) {
    std::vector<int> had_some(2);
    const auto found = on_shm_ranks<Values>(2, [&](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, {.communicator = rank.communicator, .shard_among = among});
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      model->set_manual_backward_finalization(true);
      for (const int64_t batch : {0, 1})
        model->forward(part_of_batch(batch, rank.where), batch == 0).backward();
      had_some[static_cast<size_t>(rank.where.rank)] =
          model->parameters().front().grad().defined() ? 1 : 0;
      model->finalize_backward();
      trireme::step(optimizer);
      return whole_values(*model, net->parameters());
    });
    CHECK(had_some == std::vector<int>(2, 0));
    for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
  }
}

TEST_CASE("what does not fit the ranks") {
  std::vector<std::string> said(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    std::string& text = said[static_cast<size_t>(rank.where.rank)];
    const auto& all = rank.communicator;
    text = error_of<c10::ValueError>(
        [&] { fully_shard(Linear(4, 4), {.communicator = all, .shard_among = 3}); });
    text += error_of<c10::ValueError>(
        [&] { fully_shard(Linear(4, 4), {.communicator = all})->set_gradient_divide_factor(0); });
  });
  for (const std::string& text : said) {
    CHECK_THAT(text, Catch::Contains("got groups of 3 ranks"));
    CHECK_THAT(text, Catch::Contains("got a divide factor of 0"));
  }
}

}  // namespace trireme::fsdp_hybrid_test
