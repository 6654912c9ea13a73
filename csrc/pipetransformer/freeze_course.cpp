#include <trireme/pipetransformer/freeze_course.h>

#include <trireme/comm/agree.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <utility>

namespace trireme {
namespace {

constexpr const char* kArea = "freeze";
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string joined(const std::vector<int64_t>& numbers) {
  std::string text;
  for (const int64_t number : numbers)
    text.append(text.empty() ? "" : " ").append(std::to_string(number));
  return text.empty() ? "none" : text;
}

std::string describe(const std::vector<std::string>& layers, const FreezeOptions& options) {
  std::string text =
      c10::str("alpha=", options.alpha, "\nrule=", options.choose ? "a function" : options.rule,
               "\nmeasure_every=", options.measure_every, "\nhold=", options.hold,
               "\neval_frozen=", options.eval_frozen, "\n", layers.size(), " layers");
  for (const std::string& layer : layers) text += "\n'" + layer + "'";
  return text;
}

// Compares what `say` returns on all ranks. Throws what it throws, else how ranks differ.
void compare(const std::function<std::string()>& say,
             const std::function<void(const std::string&)>& agree) {
  std::string own;
  std::exception_ptr error;
  try {
    own = say();
  } catch (...) {
    error = std::current_exception();
    own = as_complaint(text_of(error));
  }
  try {
    agree(own);
  } catch (const c10::ValueError&) {
    if (error) std::rethrow_exception(error);
    throw;
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

FreezeCourse::FreezeCourse(std::vector<std::string> layers, FreezeOptions options,
                           std::shared_ptr<Communicator> ranks)
    : options_(std::move(options)), ranks_(std::move(ranks)) {
  state_.layers = std::move(layers);
  compare(
      [&] {
        if (!(options_.alpha > 0 && options_.alpha < 1))
          refuse(c10::str("got alpha ", options_.alpha, ", expected a number between 0 and 1"),
                 "Pass the share of the layers still trained that an interval freezes, as 1/3.");
        if (state_.layers.empty()) refuse("got no layers", "Name them, from the input on.");
        if (!options_.choose && options_.rule != "gradient" && options_.rule != "schedule")
          refuse("got rule '" + options_.rule + "', expected 'gradient' or 'schedule'",
                 "Or pass a function.");
        if (options_.measure_every < 1)
          refuse(c10::str("got measure_every ", options_.measure_every, ", expected 1 or more"),
                 "Pass 1 to measure each step.");
        if (options_.hold < 0)
          refuse(c10::str("got hold ", options_.hold, ", expected 0 or more"),
                 "Pass 0 to freeze from the first interval on.");
        return describe(state_.layers, options_);
      },
      [this](const std::string& own) { agree(own, false); });
  begin_interval();
}

RankOf FreezeCourse::where() const { return ranks_ ? ranks_->rank_of() : RankOf{}; }

void FreezeCourse::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text(kArea, got, where(), next_step));
}

// A rank's own complaint is thrown by its caller.
bool FreezeCourse::agree(const std::string& own, bool flag) {
  if (!ranks_) return flag;
  const ComparedText said{own, "freezing", flag};
  const Comparison compared = compare_texts(said, *ranks_, ranks_->device());
  if (compared.are_equal) return compared.any_flag;
  const std::vector<std::string> texts = distinct_texts(said, *ranks_, ranks_->device());
  if (const auto wrong = first_complaint(texts))
    refuse(c10::str("got what rank ", wrong->rank, " cannot use: ", wrong->text),
           "Give all ranks the same.");
  if (const auto found = first_difference(texts))
    refuse(c10::str("got ranks that freeze differently: '", found->first, "' on rank 0, '",
                    found->other, "' on rank ", found->rank),
           "Call step(), advance(), unfreeze() and load_state_dict() alike on all ranks.");
  return compared.any_flag;
}

void FreezeCourse::begin_interval() {
  steps_ = measured_ = 0;
  squares_ = at::zeros({layers()}, at::kDouble);
}

bool FreezeCourse::measures() const {
  const bool needs_norms = options_.choose || options_.rule == "gradient";
  return needs_norms && static_cast<int64_t>(state_.history.size()) >= options_.hold &&
         steps_ % options_.measure_every == 0;
}

bool FreezeCourse::begin_step() {
  const bool is_measured = measures();
  ++steps_;
  return is_measured;
}

void FreezeCourse::measure(const std::vector<std::vector<GradNormPart>>& parts) {
  const at::NoGradGuard no_grad;
  const int64_t world = ranks_ ? ranks_->world() : 1;
  std::vector<at::Tensor> squares;
  for (const auto& of_layer : parts) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const GradNormPart& part : of_layer) {
      const at::Tensor own = own_squares(part, world);
      sum = sum.to(own.device()) + own;
    }
    squares.push_back(sum);
  }
  for (at::Tensor& one : squares) one = one.to(squares.back().device());
  const at::Tensor all = at::stack(squares);
  squares_ = squares_.to(all.device()) + all;
  ++measured_;
}

std::string FreezeCourse::text() const {
  return c10::str("frozen now: ", state_.frozen,
                  "\nfrozen behind each advance(): ", joined(state_.history),
                  "\nsteps measured: ", measured_);
}

// The norm of all gradients measured, for an interval's are summed up once, as squares.
std::vector<double> FreezeCourse::norms() {
  std::vector<double> found(static_cast<size_t>(layers() - state_.frozen), kNone);
  if (measured_ == 0) return found;
  at::Tensor sums = squares_.to(ranks_ ? ranks_->device() : c10::Device(c10::kCPU));
  if (ranks_) ranks_->all_reduce({sums}, ReduceOp::kSum, "norms of the layers").wait();
  sums = sums.sqrt().to(at::kCPU);
  for (size_t i = 0; i < found.size(); ++i) {
    const double norm = sums.const_data_ptr<double>()[static_cast<size_t>(state_.frozen) + i];
    if (norm != 0) found[i] = norm;  // what has no gradient, or none yet, has not converged
  }
  return found;
}

int64_t FreezeCourse::decide(const std::vector<double>& norms) {
  const auto interval = static_cast<int64_t>(state_.history.size());
  if (interval < options_.hold) return state_.frozen;
  const FreezePoint point{layers(), state_.frozen, interval, norms};
  if (options_.choose) return chosen(point);
  if (options_.rule == "gradient") return frozen_by_gradient(point, options_.alpha);
  return std::max(state_.frozen,
                  frozen_by_schedule(layers(), options_.alpha, interval + 1 - options_.hold));
}

int64_t FreezeCourse::chosen(const FreezePoint& point) {
  int64_t frozen = 0;
  compare(
      [&] {
        frozen = options_.choose(point);
        if (frozen < point.frozen || frozen > point.layers)
          refuse(c10::str("got ", frozen, " layers from rule, expected ", point.frozen, " to ",
                          point.layers),
                 "Use unfreeze() to train layers again.");
        return c10::str("layers that rule freezes: ", frozen);
      },
      [this](const std::string& own) { agree(own, false); });
  return frozen;
}

int64_t FreezeCourse::advance(bool keeps_last) {
  const bool trains_others = agree(text(), !keeps_last);
  const bool needs_norms = options_.choose || options_.rule == "gradient";
  int64_t frozen = decide(needs_norms ? norms() : std::vector<double>());
  if (!trains_others) frozen = std::min(frozen, std::max(state_.frozen, layers() - 1));
  state_.frozen = frozen;
  state_.history.push_back(frozen);
  begin_interval();
  return frozen;
}

void FreezeCourse::unfreeze(int64_t stay) {
  if (stay < 0 || stay > state_.frozen)
    refuse(c10::str("got ", stay, " layers that stay frozen, expected 0 to ", state_.frozen),
           "Pass how many of the frozen layers stay so.");
  state_.frozen = stay;
  begin_interval();
}

void FreezeCourse::load(const FreezeState& state) {
  if (state.layers != state_.layers)
    refuse(c10::str("got a state of ", state.layers.size(), " layers, expected one of the same ",
                    layers(), " by name"),
           "Name the same layers as when it was saved.");
  const auto fits = [this](int64_t count) { return count >= 0 && count <= layers(); };
  if (!fits(state.frozen) || !std::all_of(state.history.begin(), state.history.end(), fits))
    refuse(c10::str("got a state of ", state.frozen, " frozen layers, expected 0 to ", layers()),
           "Load what state_dict() returned.");
  state_ = state;
  begin_interval();
}

}  // namespace trireme
