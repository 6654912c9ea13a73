#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <thread_ranks.h>
#include <vector>

namespace trireme::test {

// What NCCL is on CUDA: an engine of the sim device with a stream of its own, on which a collective
// happens once what the caller's stream was given is done. wait() lets the caller's stream wait,
// not the caller. Tensors are kept until wait(). Gloo moves the bytes.
c10::intrusive_ptr<c10d::Backend> make_sim_engine(const c10::intrusive_ptr<c10d::Store>& store,
                                                  RankOf where);

enum class SimGroup {
  kAlone,       // like "nccl"
  kBesideGloo,  // like "cpu:gloo,cuda:nccl"
};

// Does what run_thread_ranks() does: each rank's current device is its own, and its group's engine
// that.
void run_sim_ranks(int64_t world, const std::function<void(ThreadRank&)>& rank_main,
                   SimGroup kind = SimGroup::kBesideGloo);

template <typename Result>
std::vector<Result> on_sim_ranks(int64_t world, const std::function<Result(ThreadRank&)>& main,
                                 SimGroup kind = SimGroup::kBesideGloo) {
  std::vector<Result> results(static_cast<size_t>(world));
  run_sim_ranks(
      world, [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = main(rank); },
      kind);
  return results;
}

}  // namespace trireme::test
