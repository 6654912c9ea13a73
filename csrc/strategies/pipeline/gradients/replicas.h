#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/average.h>
#include <trireme/grad/codes/coded_average.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: replicas of a pipeline]
//
// Each replica of a pipeline has the same stages on as many ranks, and trains on a batch of its
// own. The ranks that hold the same stages are a group. Here they average gradients, like a
// DistributedDataParallel whose backwards are all in no_sync() but for the last micro-batch:
//
// * A stage is averaged when its last backward is done, while others still compute. All replicas
// run
//   the same table, so that they come to the same collectives in the same order, and wait for each
//   other in no circle.
// * Gradients are summed where they lie: what a step makes is apart from what .grad held before
//   (step_gradients.h), so that a step that fails loses nothing. What was there is averaged, too: a
//   step that did not synchronize may have left it.
// * A parameter that no replica used keeps its .grad; one that some did not use counts as zeros
// there.
//   Sparse gradients stay sparse where all replicas have such.
// * Tied parameters are averaged last, by the rank of their first stage alone, between their sum
//   and its way back: so all their copies get the same bits.

// Averages gradients over the replicas of a pipeline. One thread at a time.
//
// Cost of a step: an all-reduce of one number at its beginning; for each stage one of two numbers
// per parameter, which is waited for, and those of the gradients, which are not.
class TRIREME_API PipelineReplicas {
 public:
  // `communicator` has the ranks of all replicas that hold the same stages; null for one replica
  // alone.
  PipelineReplicas(std::shared_ptr<Communicator> communicator,
                   const std::optional<Compression>& compression);

  bool exist() const { return communicator_ != nullptr && communicator_->world() > 1; }
  Communicator& communicator() { return *communicator_; }

  // Sets the parameters of all stages of this rank, by which codes know them.
  void set_parameters(const NamedParameters& parameters);

  // Broadcasts tensors of the first replica to all. Collective.
  void spread(const std::vector<at::Tensor>& tensors);

  // Collective. Throws ValueError on all replicas where one averages and another one does not.
  void begin_step(int64_t step, bool averages);

  // Begins to average .grad of `parameters`, the same ones on all replicas. Collective.
  void average(const std::vector<at::Tensor>& parameters, const std::string& label);
  // Waits for the averages: .grad then holds them.
  void finish();
  void end_step() {
    if (coded_ != nullptr) coded_->end_step();
  }
  // Tells the other replicas, and drops the averages.
  void abandon(const std::string& why) noexcept;

  // Return what this rank sent as codes in the last step, and what codes keep; nothing where
  // nothing is compressed.
  SentCodes sent() const { return coded_ ? coded_->sent() : SentCodes{}; }
  std::vector<KeptCodes> kept_codes() const;

 private:
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<ListAverage> average_;  // null for one replica alone
  CodedAverage* coded_ = nullptr;         // that, if it sends codes
};

}  // namespace trireme
