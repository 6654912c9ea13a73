#pragma once

#include <trireme/comm/forwarding_communicator.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::test {

// One verb that was called.
struct WireRecord {
  std::string verb;  // "all_reduce", "broadcast", ...
  std::string label;
  int64_t bytes = 0;  // bytes of this rank's tensors
  std::vector<std::string> dtypes;
};

// A communicator that notes every verb, and then passes it on.
class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  explicit RecordingCommunicator(std::shared_ptr<Communicator> inner);
  // Plays a group in which every peer holds the same tensors as this rank: so sums multiply by
  // `world`, gathers repeat.
  explicit RecordingCommunicator(RankOf where);

  Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) override;
  Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) override;
  Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::string label) override;
  Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                         ReduceOp op, std::string label) override;
  Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label) override;
  Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label) override;
  Pending barrier(std::string label) override;

  const std::vector<WireRecord>& records() const { return records_; }
  void clear() { records_.clear(); }

 private:
  void note(const char* verb, const std::string& label, const std::vector<at::Tensor>& tensors);

  std::vector<WireRecord> records_;
};

}  // namespace trireme::test
