#include <trireme/grad/codes/coded_average.h>

#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/codes/senders.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

void CodedAverage::set_parameters(const NamedParameters& parameters) {
  infos_ = describe_parameters(parameters);
  parameters_ = parameters.tensors;
  numbers_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i)
    numbers_.try_emplace(parameters_[i].unsafeGetTensorImpl(), i);
}

void CodedAverage::begin_step() {
  in_flight_.clear();
  coder_.begin_step();
}

size_t CodedAverage::number_of(const at::Tensor& parameter) const {
  return numbers_.at(parameter.unsafeGetTensorImpl());
}

void CodedAverage::begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
                         const Labels& labels) {
  if (like.empty()) return;
  const at::NoGradGuard no_grad;
  const ValueCounts counts = count_values(*group_, values, labels.found);
  Flight real{.label = labels.sums};
  Flight complex{.label = labels.sums};
  for (size_t i = 0; i < like.size(); ++i) {
    if (counts.sparse[i] > 0) refuse_sparse(infos_[number_of(like[i])].name, group_->rank_of());
    if (counts.any[i] == 0) continue;  // what is kept of it stays
    Flight& flight = like[i].is_complex() ? complex : real;
    flight.like.push_back(like[i]);
    flight.values.push_back(values[i].defined()
                                ? values[i].contiguous()
                                : at::zeros_like(like[i], at::MemoryFormat::Contiguous));
  }
  launch(std::move(real));
  launch(std::move(complex));
}

void CodedAverage::launch(Flight flight) {
  if (flight.like.empty()) return;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& value : flight.values) flat.push_back(value.view({-1}));
  const bool is_complex = flight.like.front().is_complex();
  flight.memory = at::cat(flat).to(at::kCPU, is_complex ? at::kComplexFloat : at::kFloat);
  CodedBucket bucket{flight.memory, {}, 1.0 / static_cast<double>(group_->world()), flight.label};
  int64_t offset = 0;
  for (const at::Tensor& parameter : flight.like) {
    const size_t number = number_of(parameter);
    bucket.parameters.push_back({parameters_[number], infos_[number].name, infos_[number].sizes,
                                 parameter.numel(), static_cast<int64_t>(number), offset});
    offset += parameter.numel();
  }
  flight.pending = coder_.code(bucket);
  in_flight_.push_back(std::move(flight));
}

void CodedAverage::finish(const Place& place) {
  const at::NoGradGuard no_grad;
  for (Flight& flight : in_flight_) {
    flight.pending.wait();
    int64_t offset = 0;
    for (size_t i = 0; i < flight.like.size(); ++i) {
      at::Tensor& value = flight.values[i];
      value.view({-1}).copy_(flight.memory.narrow(0, offset, value.numel()));
      offset += value.numel();
      place(flight.like[i], std::move(value));
    }
  }
  in_flight_.clear();
}

void CodedAverage::abandon() {
  in_flight_.clear();
  coder_.take_back_all();
}

KeptCodes CodedAverage::kept_codes() { return {&coder_, infos_, parameters_}; }

}  // namespace trireme
