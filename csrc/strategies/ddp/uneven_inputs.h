#pragma once

#include <trireme/strategies/ddp/ddp.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

namespace trireme {

struct JoinOptions {
  // What sums are divided by once some ranks have run out of inputs: all ranks, as if the others
  // had gradients of zero, or (false) only the ranks that still train.
  bool divide_by_initial_world_size = true;
  // Raise on every rank as soon as one has run out, instead of going on without it.
  bool throw_on_early_termination = false;
};

// Training on ranks with different numbers of inputs (torch.distributed.algorithms.Join): before
// each forward all ranks say in one all-reduce of 4 x world bytes who still has inputs, and a rank
// that has none takes part in the others' collectives with zeros.
class TRIREME_API UnevenInputs {
 public:
  // Copies nothing: `ddp` must outlive this.
  UnevenInputs(Ddp& ddp, const JoinOptions& options);
  ~UnevenInputs();
  UnevenInputs(const UnevenInputs&) = delete;
  UnevenInputs& operator=(const UnevenInputs&) = delete;

  // Called on a rank with inputs, before each forward. Returns the rank whose buffers all take.
  int64_t before_forward(bool synchronize, bool sync_buffers);

  // Called on a rank that has run out: returns when all have, with the parameters and `buffers` of
  // one that trained to the end.
  void accompany(const std::function<std::vector<at::Tensor>()>& buffers);

  // Tells the others that training on this rank ended by `error`, unless all raise it anyway.
  void abandon(const std::exception& error) noexcept;

 private:
  struct Round {
    int64_t active = 0;  // ranks with inputs
    int64_t root = 0;    // the lowest of them
    bool synchronize = false;
    bool sync_buffers = false;
  };
  Round meet(int32_t flags);

  Ddp& ddp_;
  JoinOptions options_;
  int64_t last_root_ = 0;
  bool ended_early_ = false;  // all ranks know
};

}  // namespace trireme
