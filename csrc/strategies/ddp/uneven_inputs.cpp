#include <trireme/strategies/ddp/uneven_inputs.h>

#include <ATen/ATen.h>

#include <string>

namespace trireme {
namespace {

constexpr int32_t kActive = 1;
constexpr int32_t kSynchronize = 2;
constexpr int32_t kSyncBuffers = 4;

}  // namespace

UnevenInputs::UnevenInputs(Ddp& ddp, const JoinOptions& options) : ddp_(ddp), options_(options) {}

UnevenInputs::~UnevenInputs() {
  ddp_.reducer().set_divisor(static_cast<double>(ddp_.communicator()->world()));
}

int64_t UnevenInputs::before_forward(bool synchronize, bool sync_buffers) {
  return meet(kActive | (synchronize ? kSynchronize : 0) | (sync_buffers ? kSyncBuffers : 0)).root;
}

void UnevenInputs::accompany(const std::function<std::vector<at::Tensor>()>& buffers) {
  for (;;) {
    const Round round = meet(0);
    if (round.active == 0) break;
    if (round.sync_buffers) ddp_.sync_buffers(buffers(), round.root);
    if (round.synchronize) ddp_.reducer().shadow_backward();
  }
  ddp_.sync_module(buffers(), last_root_);
}

void UnevenInputs::abandon(const std::exception& error) noexcept {
  if (ended_early_) return;
  ddp_.communicator()->announce_failure(std::string("join was left by an exception: ") +
                                        error.what());
}

UnevenInputs::Round UnevenInputs::meet(int32_t flags) {
  const RankOf where = ddp_.communicator()->rank_of();
  at::Tensor told = at::zeros({where.world}, at::kInt);
  told[where.rank].fill_(flags);
  told = told.to(ddp_.device());
  ddp_.communicator()->all_reduce({told}, ReduceOp::kSum, "who still has inputs").wait();
  const at::Tensor heard = told.cpu();

  Round round;
  int64_t first_without = -1;
  for (int64_t rank = where.world - 1; rank >= 0; --rank) {
    const int32_t of_rank = heard.const_data_ptr<int32_t>()[rank];
    if (of_rank == 0) {
      first_without = rank;
      continue;
    }
    ++round.active;
    round.root = rank;
    round.synchronize |= (of_rank & kSynchronize) != 0;
    round.sync_buffers |= (of_rank & kSyncBuffers) != 0;
  }
  ended_early_ = options_.throw_on_early_termination && first_without >= 0 && round.active > 0;
  TORCH_CHECK(
      !ended_early_,
      error_text("ddp",
                 "got uneven inputs, expected as many on every rank: rank " +
                     std::to_string(first_without) + " has none left",
                 where, "Leave throw_on_early_termination out to go on with the other ranks."));
  if (round.active > 0) last_root_ = round.root;
  if (!options_.divide_by_initial_world_size && round.active > 0)
    ddp_.reducer().set_divisor(static_cast<double>(round.active));
  return round;
}

}  // namespace trireme
