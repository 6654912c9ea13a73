#include <trireme/grad/codes/in_flight.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

// Calls visit(values, where they are packed).
template <typename Visit>
void each_dense(const CodeExchange& exchange, const at::Tensor& packed, const Visit& visit) {
  int64_t begin = 0;
  for (const CodedGradient& gradient : exchange.gradients) {
    if (!gradient.is_dense) continue;
    const int64_t end = begin + gradient.numel;
    visit(Span{gradient.values, at::kFloat, gradient.numel}, slice(span_of(packed), begin, end));
    begin = end;
  }
}

}  // namespace

InFlight::InFlight(CodeExchange exchange) : exchange_(std::move(exchange)) {}

bool InFlight::done() const {
  return std::all_of(verbs_.begin(), verbs_.end(), [](const Pending& verb) { return verb.done(); });
}

void InFlight::wait() {
  for (Pending& verb : verbs_) verb.wait();
  if (!std::exchange(is_finished_, true)) finish();
}

std::optional<Pending::Clock::time_point> InFlight::finished_at() const {
  return verbs_.empty() ? std::nullopt : verbs_.back().finished_at();
}

float* InFlight::residual_of(const CodedGradient& gradient) {
  const at::Tensor& residual = gradient.kept->residual;
  return residual.defined() ? residual.data_ptr<float>() : nullptr;
}

at::Tensor InFlight::take_memory(int64_t numel, at::ScalarType dtype) const {
  CodeMemory* memory = exchange_.code_memory;
  return memory != nullptr ? memory->take(numel, dtype) : at::empty({numel}, dtype);
}

int64_t InFlight::reduce(at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  tensor = tensor.to(exchange_.senders->device());
  verbs_.push_back(exchange_.senders->all_reduce({tensor}, ReduceOp::kSum, exchange_.label));
  return static_cast<int64_t>(tensor.nbytes());
}

at::Tensor InFlight::packed_dense() const {
  int64_t numel = 0;
  for (const CodedGradient& gradient : exchange_.gradients)
    if (gradient.is_dense) numel += gradient.numel;
  at::Tensor packed = take_memory(numel, at::kFloat);
  each_dense(exchange_, packed,
             [&](Span values, Span to) { scaled_copy(to, values, exchange_.factor); });
  return packed;
}

void InFlight::unpack_dense(const at::Tensor& packed) const {
  const at::Tensor here = packed.cpu();
  each_dense(exchange_, here, [](Span values, Span from) { scaled_copy(values, from, 1); });
}

}  // namespace trireme
