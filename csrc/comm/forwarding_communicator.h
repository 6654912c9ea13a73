#pragma once

#include <trireme/comm/communicator.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// A communicator that passes the verbs and the state of its group on to `inner`; a derived class
// says what it does otherwise. What goes around the verbs (host(), split(), own_channels()) is not
// passed on: a derived class would not see it.
class TRIREME_API ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner);

  const std::shared_ptr<Communicator>& inner() const { return inner_; }

  RankOf rank_of() const override { return inner_->rank_of(); }
  Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) override;
  Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) override;
  Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::string label) override;
  Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                         ReduceOp op, std::string label) override;
  Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label) override;
  Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label) override;
  Pending barrier(std::string label) override;
  bool scatter_waits() const override { return inner_->scatter_waits(); }
  void announce_failure(const std::string& reason) noexcept override;
  void recover() override { inner_->recover(); }
  std::optional<std::string> failure() const override { return inner_->failure(); }
  c10::Device device() const override { return inner_->device(); }
  void show_step(int64_t number, bool is_done) noexcept override;
  std::shared_ptr<GroupHealth> health() const override { return inner_->health(); }

 private:
  std::shared_ptr<Communicator> inner_;
};

}  // namespace trireme
