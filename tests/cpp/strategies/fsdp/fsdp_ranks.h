#pragma once

#include <trireme/strategies/fsdp/fully_shard.h>

#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::test {

inline FsdpOptions over(const ThreadRank& rank) { return {.communicator = rank.communicator}; }

// What every rank of `world` says, over shared memory.
template <typename Result>
std::vector<Result> on_shm_ranks(int64_t world, const std::function<Result(ThreadRank&)>& main) {
  return on_ranks<Result>(world, Engine::kShm, main);
}

// One step of rank `where` of them, over its part of the batch.
template <typename Model>
void fsdp_step(Model& model, torch::optim::Optimizer& optimizer, int64_t number, RankOf where) {
  optimizer.zero_grad();
  model->forward(part_of_batch(number, where), number % 2 == 0).backward();
  trireme::step(optimizer);
}

// Whether memory of a module's own parameters is there.
inline bool has_memory(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters())
    if (parameter.numel() > 0 && parameter.storage().nbytes() > 0) return true;
  return false;
}

// All of the parameters, once all ranks have written them.
inline Values whole_values(ShardedModule& model, const Values& parameters) {
  model.unshard();
  return values_of(parameters);
}

}  // namespace trireme::test
