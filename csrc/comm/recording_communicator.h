#pragma once

#include <trireme/comm/communicator.h>

#include <string>
#include <vector>

namespace trireme {

// One verb that was called.
struct WireRecord {
  std::string verb;  // "all_reduce", "broadcast", ...
  std::string label;
  int64_t bytes = 0;  // bytes of this rank's tensors
  std::vector<std::string> dtypes;
};

// A Communicator for tests: notes every verb, then passes it to `inner`, or, without one, plays a
// group in which every peer holds the same tensors as this rank (so sums multiply by `world`,
// gathers repeat).
class TRIREME_API RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(std::shared_ptr<Communicator> inner);
  explicit RecordingCommunicator(RankOf where);

  RankOf rank_of() const override { return where_; }
  Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) override;
  Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) override;
  Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::string label) override;
  Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                         ReduceOp op, std::string label) override;
  Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label) override;
  Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label) override;
  Pending barrier(std::string label) override;
  void announce_failure(const std::string& reason) noexcept override;
  void recover() override;
  std::optional<std::string> failure() const override;
  std::shared_ptr<GroupHealth> health() const override {
    return inner_ ? inner_->health() : nullptr;
  }

  const std::vector<WireRecord>& records() const { return records_; }
  void clear() { records_.clear(); }

 private:
  void note(const char* verb, const std::string& label, const std::vector<at::Tensor>& tensors);

  std::shared_ptr<Communicator> inner_;
  RankOf where_;
  std::vector<WireRecord> records_;
  std::optional<std::string> failure_;
};

}  // namespace trireme
