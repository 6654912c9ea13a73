#include <trireme/grad/outer_all_reduce.h>

#include <utility>

namespace trireme {
namespace {

class ReplicaSum final : public OuterAllReduce {
 public:
  explicit ReplicaSum(std::shared_ptr<Communicator> replicas) : replicas_(std::move(replicas)) {}

  Pending sum(std::vector<at::Tensor> sums, const std::string& label) override {
    if (sums.empty()) return {};
    return replicas_->all_reduce(std::move(sums), ReduceOp::kSum, label);
  }
  void announce_failure(const std::string& text) noexcept override {
    if (replicas_->world() > 1 && !replicas_->failure()) replicas_->announce_failure(text);
  }

 private:
  std::shared_ptr<Communicator> replicas_;
};

}  // namespace

std::unique_ptr<OuterAllReduce> make_replica_sum(std::shared_ptr<Communicator> replicas) {
  return std::make_unique<ReplicaSum>(std::move(replicas));
}

}  // namespace trireme
