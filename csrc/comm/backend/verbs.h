#pragma once

#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/communicator.h>
#include <trireme/comm/group_health.h>
#include <trireme/comm/host.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The collectives of a Communicator over the backend "trireme", on one host or several. Lists of
// CPU tensors are passed on without flat copies, in one collective per dtype (one per tensor for
// gathers and reduce_scatters); tensors of other devices go through `others`, of the same group.
// Derived classes say which memory ranks share, and what follows a failure.
class ShmVerbs : public Communicator, public Host {
 public:
  ShmVerbs(c10::intrusive_ptr<ShmBackend> backend, std::shared_ptr<Communicator> others);

  RankOf rank_of() const override { return others_->rank_of(); }
  Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) override;
  Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) override;
  Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::string label) override;
  Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                         ReduceOp op, std::string label) override;
  Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label) override;
  Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label) override;
  Pending barrier(std::string label) override;
  std::optional<std::string> failure() const override;
  void show_step(int64_t number, bool is_done) noexcept override;
  Host* host() override { return this; }
  std::shared_ptr<GroupHealth> health() const override { return health_; }
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks,
                                      const std::string& name) override;

 protected:
  using Works = std::vector<ShmBackend::WorkPtr>;

  // Returns the works of `submit`, which runs under that label.
  static Pending issue(std::string label, const std::function<Works()>& submit);
  static SharedMemory memory_of(shm::SharedSegment shared);
  const c10::intrusive_ptr<ShmBackend>& backend() const { return backend_; }
  // Returns the communicator for other devices, and notes that it is used.
  Communicator& others();
  bool uses_others() const { return uses_others_; }

  shm::HostGroup& group() override { return backend_->host_group(); }

 private:
  c10::intrusive_ptr<ShmBackend> backend_;
  std::shared_ptr<Communicator> others_;
  std::shared_ptr<GroupHealth> health_;
  bool uses_others_ = false;
};

}  // namespace trireme
