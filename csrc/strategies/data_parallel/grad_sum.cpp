#include <trireme/strategies/data_parallel/grad_sum.h>

#include <trireme/common/sole_reference.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {
namespace {

at::Tensor sum_of(at::Tensor sum, const at::Tensor& part) {
  if (!sum.defined()) return part;
  if (!part.defined()) return sum;
  const at::Tensor here = part.to(sum.device(), /*non_blocking=*/true);
  if (!sum.is_sparse() && is_sole_reference(sum)) return sum.add_(here);
  return sum + here;
}

}  // namespace

// The hooks on the leaves of one replica.
class GradSum::Replica final : public GradSink {
 public:
  Replica(GradSum& sum, size_t replica) : sum_(sum), replica_(replica) {}

  void attach(const std::vector<at::Tensor>& leaves) {
    hooks_.resize(leaves.size());
    for (size_t i = 0; i < leaves.size(); ++i)
      if (leaves[i].requires_grad() && !hooks_[i].is_attached_to(leaves[i]))
        hooks_[i] = GradHook(leaves[i], static_cast<int64_t>(i), *this);
  }

  void gradient_ready(int64_t index, bool has_gradient) override {
    if (sum_.cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    if (has_gradient) sum_.came(replica_, static_cast<size_t>(index));
  }

 private:
  GradSum& sum_;
  size_t replica_;
  std::vector<GradHook> hooks_;
};

GradSum::GradSum(const std::vector<std::vector<at::Tensor>>& leaves)
    : leaves_(leaves), parts_(leaves.size()), arrived_(leaves.front().size()) {
  for (size_t replica = 0; replica < leaves.size(); ++replica) {
    replicas_.push_back(std::make_unique<Replica>(*this, replica));
    parts_[replica].resize(leaves[replica].size());
  }
}

GradSum::~GradSum() = default;

void GradSum::begin(const std::vector<size_t>& replicas, const std::vector<at::Tensor>& masters) {
  active_ = replicas;
  homes_.clear();
  for (const at::Tensor& master : masters) homes_.push_back(master.device());
  for (const size_t replica : replicas) replicas_[replica]->attach(leaves_[replica]);
  for (auto& count : arrived_) count.store(0, std::memory_order_relaxed);
  sums_.assign(masters.size(), {});
  cancelled_.store(false, std::memory_order_relaxed);
}

void GradSum::came(size_t replica, size_t parameter) {
  at::Tensor gradient = std::exchange(leaves_[replica][parameter].mutable_grad(), {});
  if (!gradient.defined()) return;  // the leaf was frozen after its forward
  Part& part = parts_[replica][parameter];
  if (part.came) {
    part.later = sum_of(std::move(part.later), gradient);
    return;
  }
  part.first = std::move(gradient);
  part.came = true;
  // The replica that counts last sees the parts that others have put down before they counted.
  const int64_t before = arrived_[parameter].fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == static_cast<int64_t>(active_.size())) sum_up(parameter);
}

void GradSum::sum_up(size_t parameter) {
  const at::NoGradGuard no_grad;
  const auto device = parts_[active_[parameter % active_.size()]][parameter].first.device();
  at::Tensor sum;
  for (const size_t replica : active_) {
    at::Tensor first = std::exchange(parts_[replica][parameter].first, {});
    if (first.device() != device) first = first.to(device, /*non_blocking=*/true);
    sum = sum_of(std::move(sum), std::move(first));
  }
  sums_[parameter] = at_home(sum, parameter);
}

at::Tensor GradSum::at_home(const at::Tensor& sum, size_t parameter) const {
  return sum.defined() ? sum.to(homes_[parameter], /*non_blocking=*/true) : sum;
}

std::vector<at::Tensor> GradSum::finish() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < sums_.size(); ++i) {
    // This adds parts that waited for a replica that does not use this parameter, and those that
    // came again.
    for (const size_t replica : active_)
      sums_[i] =
          sum_of(std::move(sums_[i]), at_home(std::exchange(parts_[replica][i].first, {}), i));
    for (const size_t replica : active_)
      sums_[i] =
          sum_of(std::move(sums_[i]), at_home(std::exchange(parts_[replica][i].later, {}), i));
    for (const size_t replica : active_) parts_[replica][i].came = false;
  }
  return std::exchange(sums_, {});
}

void GradSum::drop() {
  for (std::vector<Part>& parts : parts_) parts.assign(parts.size(), Part{});
  for (const std::vector<at::Tensor>& leaves : leaves_)
    for (const at::Tensor& leaf : leaves) leaf.mutable_grad().reset();
  sums_.clear();
}

}  // namespace trireme
