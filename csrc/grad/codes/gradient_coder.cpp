#include <trireme/grad/codes/gradient_coder.h>

#include <trireme/comm/host.h>
#include <trireme/common/trace.h>
#include <trireme/shm/host_group.h>

#include <ATen/ATen.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace trireme {
namespace {

// Returns the gradients of a bucket as adjacent real numbers.
at::Tensor reals_of(const at::Tensor& payload) {
  const at::Tensor flat = payload.view({-1});
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

// Returns the parts of the memory of a bucket that hold its gradients; neighbours are one.
std::vector<at::Tensor> gradients_in(const at::Tensor& memory, const CodedBucket& bucket,
                                     int64_t reals) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  int64_t end = 0;  // of neighbours
  const auto add = [&] {
    if (end > begin) parts.push_back(memory.narrow(0, begin * reals, (end - begin) * reals));
  };
  for (const CodedParameter& parameter : bucket.parameters) {
    if (parameter.offset != end) {
      add();
      begin = parameter.offset;
    }
    end = parameter.offset + parameter.numel;
  }
  add();
  return parts;
}

}  // namespace

GradientCoder::GradientCoder(std::shared_ptr<Communicator> ranks, const Compression& compression)
    : ranks_(std::move(ranks)), compression_(compression) {
  check(compression_);
}

int64_t GradientCoder::senders() {
  if (!senders_) {
    senders_ = make_senders(ranks_, between(compression_));
    Host* host = ranks_->host();
    may_go_on_ = host != nullptr && host->group().hosts().size() == 1;
  }
  return senders_->count;
}

void GradientCoder::begin_step() {
  senders();
  journeys_ = std::make_shared<BucketJourneys>(*senders_);
  residuals_.forget_copies();
  memory_.forget_unused();
  sent_ = {};
  ++steps_;
  is_in_step_ = true;
}

void GradientCoder::take_back_all() {
  if (std::exchange(is_in_step_, false)) residuals_.take_back_all();
}

Pending GradientCoder::code(const CodedBucket& bucket) {
  TRIREME_TRACE("gradient_coder.code");
  const at::NoGradGuard no_grad;
  const at::Tensor gradients = reals_of(bucket.payload);
  BucketJourney journey;
  journey.memory = gradients.to(at::kCPU, at::kFloat);  // the same, if it is that already
  if (!journey.memory.is_same(gradients)) journey.copy_to = gradients;
  journey.label = bucket.label;
  journey.parts_of_legs.resize(static_cast<size_t>(senders_->legs));
  // A host's input counts as much as those of all its ranks, whatever their number.
  const double share = static_cast<double>(senders_->count) / static_cast<double>(ranks_->world());
  CodeExchange codes{senders_->between, {}, journey.memory, bucket.scale / share, bucket.label};
  codes.input_scale = share * bucket.input_scale;
  codes.code_memory = &memory_;
  const int64_t reals = bucket.payload.is_complex() ? 2 : 1;
  journey.gradients = gradients_in(journey.memory, bucket, reals);
  for (const CodedParameter& parameter : bucket.parameters) {
    const at::Tensor values =
        journey.memory.narrow(0, parameter.offset * reals, parameter.numel * reals);
    for (int64_t leg = 0; leg < senders_->legs; ++leg) {
      const Part part = part_of(parameter, values.numel(), leg);
      if (part.numel == 0) continue;
      journey.parts_of_legs[static_cast<size_t>(leg)].push_back(
          values.narrow(0, part.begin, part.numel));
      if (leg == senders_->leg) codes.gradients.push_back(coded(parameter, values, part));
    }
  }
  journey.exchange = [this, codes = std::move(codes)] { return exchange(codes); };
  return journeys_->start(std::move(journey));
}

bool GradientCoder::is_always_dense(const CodedParameter& parameter) const {
  const auto& sizes = parameter.largest.empty() ? parameter.sizes : parameter.largest;
  return is_dense(compression_, matrix_shape(sizes));
}

bool GradientCoder::is_sent_dense(const CodedParameter& parameter) const {
  const auto* low_rank = std::get_if<PowerSGD>(&compression_);
  if (low_rank != nullptr && steps_ <= low_rank->start_step) return true;
  return is_always_dense(parameter);
}

// Cuts a parameter between the legs of a host, so that codes do not depend on legs. One that must
// not be cut goes by one of them.
GradientCoder::Part GradientCoder::part_of(const CodedParameter& parameter, int64_t numel,
                                           int64_t leg) const {
  const auto unit = is_always_dense(parameter) ? std::nullopt : unit_of(compression_);
  if (!unit) return parameter.number % senders_->legs == leg ? Part{0, numel} : Part{};
  const int64_t units = (numel + *unit - 1) / *unit;
  const int64_t begin = std::min(numel, leg * units / senders_->legs * *unit);
  return {begin, std::min(numel, (leg + 1) * units / senders_->legs * *unit) - begin};
}

CodedGradient GradientCoder::coded(const CodedParameter& parameter, const at::Tensor& values,
                                   Part part) {
  CodedGradient gradient{values.data_ptr<float>() + part.begin, part.numel,
                         is_sent_dense(parameter), part.begin, matrix_shape(parameter.sizes)};
  if (gradient.is_dense) return gradient;
  gradient.shape.columns *= values.numel() / parameter.numel;  // two reals of a complex number
  gradient.kept = &residuals_.of(parameter.tensor, part.numel, has_error_feedback(compression_));
  if (!parameter.arrived || may_go_on_) residuals_.keep_copy(parameter.tensor);
  gradient.draw = static_cast<uint32_t>(c10::get_hash(parameter.name, steps_));
  return gradient;
}

CodesInFlight GradientCoder::exchange(CodeExchange exchange) {
  const at::NoGradGuard no_grad;
  const auto begin = Pending::Clock::now();
  CodesInFlight flight = start_exchange(compression_, std::move(exchange));
  sent_.bytes += flight.sent_bytes;
  sent_.encode_ms +=
      std::chrono::duration<double, std::milli>(Pending::Clock::now() - begin).count();
  return flight;
}

std::vector<KeptPart> GradientCoder::kept_parts(const std::vector<ParameterInfo>& infos,
                                                const std::vector<at::Tensor>& tensors,
                                                bool makes) {
  std::vector<CodedParameter> parameters;
  for (size_t i = 0; i < infos.size(); ++i)
    parameters.push_back(
        {tensors[i], infos[i].name, infos[i].sizes, infos[i].numel, static_cast<int64_t>(i)});
  return kept_parts(parameters, makes);
}

std::vector<KeptPart> GradientCoder::kept_parts(const std::vector<CodedParameter>& parameters,
                                                bool makes) {
  std::vector<KeptPart> parts;
  if (!senders_ || !senders_->has_leg()) return parts;
  for (const CodedParameter& parameter : parameters) {
    if (is_always_dense(parameter)) continue;
    const int64_t numel = parameter.tensor.is_complex() ? 2 * parameter.numel : parameter.numel;
    const Part part = part_of(parameter, numel, senders_->leg);
    if (part.numel == 0) continue;
    KeptOfCode* kept =
        makes ? &residuals_.of(parameter.tensor, part.numel, has_error_feedback(compression_))
              : residuals_.find(parameter.tensor);
    if (kept != nullptr)
      parts.push_back({parameter.name, numel, senders_->number, part.begin, kept, parameter.number,
                       part.numel});
  }
  return parts;
}

void GradientCoder::forget() {
  residuals_ = {};
  steps_ = 0;
}

void GradientCoder::announce_failure(const std::string& text) const noexcept {
  if (senders_) senders_->announce_failure(text);
}

}  // namespace trireme
