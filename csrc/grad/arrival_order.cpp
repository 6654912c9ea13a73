#include <trireme/grad/arrival_order.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

void ArrivalOrder::begin(size_t parameters) {
  observing_ = true;
  has_begun_ = false;
  arrivals_.clear();
  times_expected_.assign(parameters, 1);
  times_seen_.assign(parameters, 0);
  last_arrived_ = -1;
}

void ArrivalOrder::begin_step() {
  has_begun_ = true;
  arrivals_.clear();
  std::fill(times_seen_.begin(), times_seen_.end(), 0);
  last_arrived_ = -1;
}

bool ArrivalOrder::arrived(int64_t parameter) {
  const auto index = static_cast<size_t>(parameter);
  last_arrived_ = parameter;
  if (observing_) arrivals_.push_back(parameter);
  return ++times_seen_[index] == times_expected_[index];
}

void ArrivalOrder::end_step() {
  for (size_t i = 0; i < times_seen_.size(); ++i) times_expected_[i] = std::max(1, times_seen_[i]);
}

void ArrivalOrder::abandon_step() {
  for (size_t i = 0; i < times_seen_.size(); ++i)
    times_expected_[i] = std::max(times_expected_[i], times_seen_[i]);
}

std::vector<int64_t> ArrivalOrder::seen_order(const std::vector<int64_t>& planned) const {
  std::vector<bool> is_placed(times_seen_.size(), true);
  for (const int64_t index : planned) is_placed[static_cast<size_t>(index)] = false;
  std::vector<int64_t> order;
  // A parameter is ready with its last gradient; read backwards, that is the first mention.
  for (auto index = arrivals_.rbegin(); index != arrivals_.rend(); ++index) {
    if (is_placed[static_cast<size_t>(*index)]) continue;
    is_placed[static_cast<size_t>(*index)] = true;
    order.push_back(*index);
  }
  std::reverse(order.begin(), order.end());
  for (const int64_t index : planned) {
    if (!is_placed[static_cast<size_t>(index)]) order.push_back(index);
  }
  return order;
}

void ArrivalOrder::send(Communicator& communicator, const std::vector<int64_t>& planned,
                        c10::Device device) {
  observing_ = false;
  sent_ = at::tensor(seen_order(planned), at::kLong).to(device);
  sending_ = communicator.broadcast({sent_}, 0, "order of gradients");
}

std::vector<int64_t> ArrivalOrder::wait() {
  const at::Tensor sent = std::exchange(sent_, {});
  observing_ = true;  // if this throws
  std::exchange(sending_, {}).wait();
  observing_ = false;
  const at::Tensor host = sent.to(at::kCPU);
  const auto* order = host.const_data_ptr<int64_t>();
  return std::vector<int64_t>(order, order + host.numel());
}

std::optional<std::vector<int64_t>> ArrivalOrder::receive(const Communicator& communicator) {
  if (!sent_.defined()) return std::nullopt;
  try {
    return wait();
  } catch (const c10::DistBackendError&) {
    if (communicator.failure()) throw;
    return std::nullopt;
  }
}

}  // namespace trireme
