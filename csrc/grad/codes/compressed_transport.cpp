#include <trireme/grad/codes/compressed_transport.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>

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

}  // namespace

CompressedTransport::CompressedTransport(std::shared_ptr<Communicator> ranks,
                                         const Compression& compression)
    : Transport(std::move(ranks), {.carries_map = false, .is_compressed = true}),
      compression_(compression) {
  check(compression_);
}

int64_t CompressedTransport::senders() {
  if (!senders_) senders_ = make_senders(ranks_, between(compression_));
  return senders_->count;
}

std::vector<KeptPart> CompressedTransport::kept_parts(const std::vector<ParameterInfo>& parameters,
                                                      const std::vector<at::Tensor>& tensors,
                                                      bool makes) {
  std::vector<KeptPart> parts;
  if (!senders_ || !senders_->has_leg()) return parts;
  step_.parameters = &parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& info = parameters[i];
    const BucketSlot slot{static_cast<int64_t>(i), 0, info.numel};
    if (is_dense(compression_, shape_of(slot))) continue;
    const int64_t numel = c10::isComplexType(info.dtype) ? 2 * info.numel : info.numel;
    const Part part = part_of(slot, numel, senders_->leg);
    if (part.numel == 0) continue;
    KeptOfCode* kept =
        makes ? &residuals_.of(tensors[i], part.numel, has_error_feedback(compression_))
              : residuals_.find(tensors[i]);
    if (kept != nullptr) parts.push_back({info.name, numel, senders_->number, part.begin, kept});
  }
  return parts;
}

void CompressedTransport::forget() {
  residuals_ = {};
  steps_ = 0;
}

void CompressedTransport::begin(const TransportStep& step) {
  senders();
  step_ = {&step.buckets, step.parameters, step.tensors,
           std::vector<bool>(step.parameters->size(), false),
           std::make_shared<BucketJourneys>(*senders_)};
  residuals_.forget_copies();
  sent_ = {};
  ++steps_;
  for (const auto& bucket : step.buckets)
    if (bucket->plan().sparse) refuse_sparse(name_of(bucket->plan().slots.front()));
}

void CompressedTransport::accumulated(size_t bucket, size_t slot) {
  Bucket& to = *(*step_.buckets)[bucket];
  const BucketSlot& planned = to.plan().slots[slot];
  if (parameter(planned).grad().layout() != at::kStrided) refuse_sparse(name_of(planned));
  step_.arrived[static_cast<size_t>(planned.parameter)] = true;
  to.gradient_arrived(slot, /*scale=*/1);
}

Pending CompressedTransport::launch(const TransportBucket& request) {
  TRIREME_TRACE("compressed_transport.launch");
  Bucket& bucket = request.bucket;
  bucket.complete(/*scale=*/1);
  const at::NoGradGuard no_grad;
  const at::Tensor gradients = reals_of(bucket.payload());
  BucketJourney journey;
  journey.memory = gradients.to(at::kCPU, at::kFloat);  // the same, if it is that already
  if (!journey.memory.is_same(gradients)) journey.copy_to = gradients;
  journey.label = request.label;
  journey.parts_of_legs.resize(static_cast<size_t>(senders_->legs));
  // A host's input counts as much as those of all its ranks, whatever their number.
  const double share = static_cast<double>(senders_->count) / static_cast<double>(ranks_->world());
  CodeExchange codes{senders_->between, {}, journey.memory, request.scale / share, request.label};
  codes.input_scale = share;
  const int64_t reals = bucket.payload().is_complex() ? 2 : 1;
  for (const BucketSlot& slot : bucket.plan().slots) {
    const at::Tensor values = journey.memory.narrow(0, slot.offset * reals, slot.numel * reals);
    for (int64_t leg = 0; leg < senders_->legs; ++leg) {
      const Part part = part_of(slot, values.numel(), leg);
      if (part.numel == 0) continue;
      journey.parts_of_legs[static_cast<size_t>(leg)].push_back(
          values.narrow(0, part.begin, part.numel));
      if (leg != senders_->leg) continue;
      codes.gradients.push_back(coded(slot, values, part));
      // A bucket beside the plan holds what other ranks may have left out.
      if (!is_of_step(request) || !step_.arrived[static_cast<size_t>(slot.parameter)])
        residuals_.keep_copy(parameter(slot));
    }
  }
  journey.exchange = [this, codes = std::move(codes)] { return exchange(codes); };
  return step_.journeys->start(std::move(journey));
}

MatrixShape CompressedTransport::shape_of(const BucketSlot& slot) const {
  return matrix_shape((*step_.parameters)[static_cast<size_t>(slot.parameter)].sizes);
}

bool CompressedTransport::is_sent_dense(const BucketSlot& slot) const {
  const auto* low_rank = std::get_if<PowerSGD>(&compression_);
  if (low_rank != nullptr && steps_ <= low_rank->start_step) return true;
  return is_dense(compression_, shape_of(slot));
}

// Cuts a parameter between the legs of a host, so that codes do not depend on legs. One that must
// not be cut goes by one of them.
CompressedTransport::Part CompressedTransport::part_of(const BucketSlot& slot, int64_t numel,
                                                       int64_t leg) const {
  const auto unit = is_dense(compression_, shape_of(slot)) ? std::nullopt : unit_of(compression_);
  if (!unit) return slot.parameter % senders_->legs == leg ? Part{0, numel} : Part{};
  const int64_t units = (numel + *unit - 1) / *unit;
  const int64_t begin = std::min(numel, leg * units / senders_->legs * *unit);
  return {begin, std::min(numel, (leg + 1) * units / senders_->legs * *unit) - begin};
}

CodedGradient CompressedTransport::coded(const BucketSlot& slot, const at::Tensor& values,
                                         Part part) {
  CodedGradient gradient{values.data_ptr<float>() + part.begin, part.numel, is_sent_dense(slot),
                         part.begin, shape_of(slot)};
  if (gradient.is_dense) return gradient;
  if (values.numel() != slot.numel) gradient.shape.columns *= values.numel() / slot.numel;
  gradient.kept = &residuals_.of(parameter(slot), part.numel, has_error_feedback(compression_));
  gradient.draw = static_cast<uint32_t>(c10::get_hash(name_of(slot), steps_));
  return gradient;
}

CodesInFlight CompressedTransport::exchange(CodeExchange exchange) {
  const at::NoGradGuard no_grad;
  const auto begin = Pending::Clock::now();
  CodesInFlight flight = start_exchange(compression_, std::move(exchange));
  sent_.bytes += flight.sent_bytes;
  sent_.encode_ms +=
      std::chrono::duration<double, std::milli>(Pending::Clock::now() - begin).count();
  return flight;
}

bool CompressedTransport::is_of_step(const TransportBucket& request) const {
  const Buckets& planned = *step_.buckets;
  return request.index < planned.size() && planned[request.index].get() == &request.bucket;
}

// No .grad gets what was sent, so it is left out as before.
void CompressedTransport::unused(int64_t parameter) {
  residuals_.take_back((*step_.tensors)[static_cast<size_t>(parameter)]);
}

void CompressedTransport::announce_failure(const std::string& text) noexcept {
  announce(*ranks_, text);
  if (senders_) senders_->announce_failure(text);
}

void CompressedTransport::refuse_sparse(const std::string& name) const {
  TORCH_CHECK_VALUE(
      false,
      error_text("compression", "got sparse gradients of '" + name + "', expected dense ones",
                 ranks_->rank_of(),
                 "Leave sparse=True out of the layer, or compression out of the wrapper."));
}

}  // namespace trireme
