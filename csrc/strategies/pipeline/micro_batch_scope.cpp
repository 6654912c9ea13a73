#include <trireme/strategies/pipeline/micro_batch_scope.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

thread_local MicroBatchScope::State seen_micro_batch;

const MicroBatches& batch_for(const char* who) {
  if (seen_micro_batch.batch == nullptr) {
    refuse_pipeline(std::string("got a call of ") + who + ", expected it in a pipeline's forward",
                    "Ask there, in front of layers that a checkpoint computes again.");
  }
  return *seen_micro_batch.batch;
}

}  // namespace

at::Tensor batch_input(size_t number) {
  const std::vector<at::Tensor>& inputs =
      batch_for("batch_input()").inputs.at(seen_micro_batch.micro_batch).tensors;
  if (number >= inputs.size()) {
    refuse_pipeline("got a call of batch_input() for input " + std::to_string(number) +
                        ", expected a number below " + std::to_string(inputs.size()) +
                        ", as many as the step has",
                    "Give step() as many, or ask for another one.");
  }
  return inputs[number];
}

at::Tensor batch_target() {
  const std::vector<at::Tensor>& targets = batch_for("batch_target()").targets;
  return targets.empty() ? at::Tensor() : targets.at(seen_micro_batch.micro_batch);
}

MicroBatchScope::MicroBatchScope(const MicroBatches& batch, int64_t micro_batch)
    : before_(std::exchange(seen_micro_batch, State{&batch, static_cast<size_t>(micro_batch)})) {}

MicroBatchScope::~MicroBatchScope() { seen_micro_batch = before_; }

}  // namespace trireme
