#include <trireme/strategies/local_sgd/worker_average.h>

#include <trireme/common/trace.h>
#include <trireme/kernels/flatten.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>
#include <variant>

namespace trireme {
namespace {

Compression among_ranks(Compression compression) {
  std::visit([](auto& method) { method.between = Between::kRanks; }, compression);
  return compression;
}

int64_t reals_in(const at::Tensor& tensor) {
  return tensor.is_complex() ? 2 * tensor.numel() : tensor.numel();
}

}  // namespace

WorkerAverage::WorkerAverage(std::shared_ptr<Communicator> workers,
                             const std::optional<Compression>& compression)
    : workers_(std::move(workers)) {
  if (compression && workers_->world() > 1)
    coder_ = std::make_unique<GradientCoder>(workers_, among_ranks(*compression));
}

void WorkerAverage::start(const Request& request) {
  TRIREME_TRACE("worker_average.start");
  const at::NoGradGuard no_grad;
  lay_out(request);
  fill(request);
  is_in_flight_ = true;
  if (coder_) return start_codes(request);
  verbs_.push_back(workers_->all_reduce({singles_}, ReduceOp::kSum, request.label));
  if (doubles_.numel() > 0)
    verbs_.push_back(workers_->all_reduce({doubles_}, ReduceOp::kSum, request.label));
}

bool WorkerAverage::goes_as_fp64(const at::Tensor& value) const {
  return !coder_ && c10::toRealValueType(value.scalar_type()) == at::kDouble;
}

void WorkerAverage::lay_out(const Request& request) {
  places_.clear();
  int64_t singles = 0, doubles = 0;
  for (const AveragedPart& part : request.parts) {
    int64_t& end = goes_as_fp64(part.value) ? doubles : singles;
    places_.push_back({{},
                       end,
                       reals_in(part.value),
                       part.value.sizes().vec(),
                       part.value.is_complex(),
                       part.anchor});
    end += places_.back().numel;
  }
  const c10::Device device =
      request.parts.empty() ? workers_->device() : request.parts.front().value.device();
  singles_ = at::empty({singles + (coder_ ? 0 : 1)}, at::device(device).dtype(at::kFloat));
  doubles_ = at::empty({doubles}, at::device(device).dtype(at::kDouble));
  for (size_t i = 0; i < places_.size(); ++i)
    places_[i].flat = goes_as_fp64(request.parts[i].value) ? doubles_ : singles_;
}

void WorkerAverage::fill(const Request& request) const {
  if (!coder_) singles_[-1].fill_(request.weight);
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    const AveragedPart& part = request.parts[i];
    const at::Tensor flat = place.flat.narrow(0, place.begin, place.numel);
    if (request.weight == 0) {
      flat.zero_();
      continue;
    }
    const auto here = [&](const at::Tensor& tensor) {
      return tensor.detach().to(flat.device()).contiguous();
    };
    const bool differs = request.of == AverageOf::kDifferences;
    flatten({here(differs ? part.anchor : part.value)}, flat, /*scale=*/1);
    if (differs) flatten_accumulate({here(part.value)}, flat, /*scale=*/-1);
    if (request.weight != 1) flat.mul_(request.weight);
  }
}

// The weight goes beside the codes, as it is.
void WorkerAverage::start_codes(const Request& request) {
  weight_ = at::full({1}, request.weight, at::device(workers_->device()).dtype(at::kFloat));
  verbs_.push_back(workers_->all_reduce({weight_}, ReduceOp::kSum, request.label));
  coder_->begin_step();
  CodedBucket bucket{singles_, {}, 1.0 / static_cast<double>(workers_->world()), request.label};
  for (size_t i = 0; i < places_.size(); ++i) {
    const AveragedPart& part = request.parts[i];
    if (places_[i].numel == 0) continue;
    bucket.parameters.push_back({part.anchor, part.name, part.value.sizes(), places_[i].numel,
                                 part.number, places_[i].begin, request.weight != 0});
  }
  verbs_.push_back(coder_->code(bucket));
}

double WorkerAverage::total_weight() const {
  return (coder_ ? weight_ : singles_[-1]).item<double>();
}

at::Tensor WorkerAverage::shaped(const Place& place) {
  const at::Tensor flat = place.flat.narrow(0, place.begin, place.numel);
  if (!place.is_complex) return flat.view(place.sizes);
  std::vector<int64_t> sizes = place.sizes;
  sizes.push_back(2);
  return at::view_as_complex(flat.view(sizes));
}

std::optional<std::vector<at::Tensor>> WorkerAverage::finish() {
  const at::NoGradGuard no_grad;
  for (Pending& verb : verbs_) verb.wait();
  const double total = total_weight();
  std::optional<std::vector<at::Tensor>> means;
  if (total > 0) {
    // A coder has divided by the number of workers already.
    const double share = coder_ ? total / static_cast<double>(workers_->world()) : total;
    for (const at::Tensor& sums : {singles_, doubles_})
      if (share != 1) sums.div_(share);
    means.emplace();
    for (const Place& place : places_) means->push_back(shaped(place));
  } else if (coder_) {
    for (const Place& place : places_) coder_->take_back(place.anchor);
  }
  abandon();
  return means;
}

void WorkerAverage::abandon() {
  is_in_flight_ = false;
  verbs_.clear();
  places_.clear();
  singles_ = doubles_ = weight_ = at::Tensor();
}

}  // namespace trireme
