#include <trireme/strategies/local_sgd/rounds.h>

#include <trireme/comm/agree.h>
#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/memory/tensor_registry.h>
#include <trireme/memory/value_hash.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <exception>
#include <utility>

namespace trireme {
namespace {

// There is one for the process: ranks may be threads.
TensorRegistry<Rounds*>& open_rounds() {
  static TensorRegistry<Rounds*> rounds;
  return rounds;
}

RoundsText text_of(const Rounds::Setup& setup) {
  RoundsText text{to_string(setup.options), setup.place};
  for (const Fragment& fragment : setup.fragments)
    text.of_all += c10::str("\na fragment of ", fragment.size(), " parameters");
  for (const RoundParameter& parameter : setup.parameters) {
    const at::Tensor& values = parameter.parameter;
    text.of_workers +=
        c10::str("\n'", parameter.name, "' of ", values.scalar_type(), " ", values.sizes());
  }
  return text;
}

// Returns the setup, which all ranks have alike.
Rounds::Setup checked(Rounds::Setup setup) {
  check(setup.options);
  check_same_rounds(setup.ranks, text_of(setup));
  return setup;
}

void announce(Communicator* ranks, const std::string& text) noexcept {
  if (ranks != nullptr && ranks->world() > 1 && !ranks->failure()) ranks->announce_failure(text);
}

}  // namespace

Rounds::Rounds(Setup setup)
    : setup_(checked(std::move(setup))),
      average_(beside(setup_.ranks.across), setup_.options.compression) {}

std::vector<size_t> Rounds::own(const Fragment& fragment) const {
  std::vector<size_t> found;
  for (const size_t index : fragment)
    if (setup_.parameters[index].anchor.defined()) found.push_back(index);
  return found;
}

std::vector<size_t> Rounds::own() const {
  std::vector<size_t> all;
  for (size_t i = 0; i < setup_.parameters.size(); ++i) all.push_back(i);
  return own(all);
}

void Rounds::begin() {
  check_usable();
  open();
  if (has_agreed_) return;
  try {
    agree_on_start();
  } catch (const std::exception& error) {
    abandon(error.what());
    open_.reset();
    throw;
  }
}

void Rounds::open() {
  std::vector<at::Tensor> parameters;
  for (const RoundParameter& parameter : setup_.parameters) {
    const auto other = open_rounds().find(parameter.parameter);
    TORCH_CHECK_VALUE(!other,
                      error_text(kRoundsArea,
                                 "got '" + parameter.name +
                                     "', which is in other open rounds, expected it in one alone",
                                 workers().rank_of(), "End the others before."));
    parameters.push_back(parameter.parameter);
  }
  open_ = std::make_shared<Rounds*>(this);
  open_rounds().put(parameters, open_);
}

void Rounds::end() {
  open_.reset();
  if (failure_.empty()) wait_for_fragment();
}

// Workers begin at the same parameters: where they have others, at those of the first worker.
void Rounds::agree_on_start() {
  const at::NoGradGuard no_grad;
  const std::vector<size_t> parameters = own();
  std::string text;
  std::vector<at::Tensor> first;
  for (const at::Tensor& values : setup_.door->values(parameters)) {
    text += std::to_string(hash_of_values(values.detach())) + " ";
    first.push_back(values.detach().contiguous().clone());
  }
  const bool are_equal =
      compare_texts({text, "parameters of workers"}, workers(), workers().device()).are_equal;
  if (!are_equal) workers().broadcast(first, 0, "parameters of the first worker").wait();
  setup_.door->write([&] {
    const std::vector<at::Tensor> values = setup_.door->values(parameters);
    for (size_t i = 0; !are_equal && i < values.size(); ++i) values[i].detach().copy_(first[i]);
    for (const Fragment& fragment : setup_.fragments) spread(fragment);
  });
  take_anchors();
  has_agreed_ = true;
}

void Rounds::take_anchors() {
  const at::NoGradGuard no_grad;
  const std::vector<size_t> parameters = own();
  const std::vector<at::Tensor> values = setup_.door->values(parameters);
  for (size_t i = 0; i < parameters.size(); ++i)
    setup_.parameters[parameters[i]].anchor.detach().copy_(values[i].detach());
}

void Rounds::after_step() {
  check_usable();
  try {
    advance();
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
}

void Rounds::advance() {
  const RoundOptions& options = setup_.options;
  ++state_.steps;
  ++state_.step;
  if (options.has_outer_step) return advance_outer();
  if (state_.steps % options.sync_every != 0 && state_.steps > options.warmup_steps) return;
  send(0);
  apply();
}

void Rounds::advance_outer() {
  const RoundOptions& options = setup_.options;
  const auto fragments = static_cast<int64_t>(setup_.fragments.size());
  if (state_.step == options.period() - options.fragment_sync_delay)
    send(static_cast<size_t>(state_.round % fragments));
  if (state_.step == options.period()) apply();
}

// Parameters themselves would be bad to code: what changes in a round is small beside them.
bool Rounds::sends_differences() const {
  return setup_.options.has_outer_step || coder() != nullptr;
}

void Rounds::send(size_t fragment) {
  TRIREME_TRACE("rounds.send");
  check_same_weight(setup_.ranks, state_.weight);
  const std::vector<size_t> parameters = own(setup_.fragments[fragment]);
  const std::vector<at::Tensor> values = setup_.door->values(parameters);
  WorkerAverage::Request request;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const RoundParameter& parameter = setup_.parameters[parameters[i]];
    request.parts.push_back(
        {parameter.name, static_cast<int64_t>(parameters[i]), parameter.anchor, values[i]});
  }
  request.of = sends_differences() ? AverageOf::kDifferences : AverageOf::kValues;
  request.weight = std::exchange(state_.weight, 1);
  request.label = label_of(fragment);
  average_.start(request);
  leaving_ = fragment;
}

const std::optional<ArrivedFragment>& Rounds::wait_for_fragment() {
  if (leaving_) arrived_ = {*leaving_, average_.finish()};
  leaving_.reset();
  return arrived_;
}

// A round that resumes without its fragment has none to apply.
void Rounds::apply() {
  TRIREME_TRACE("rounds.apply");
  wait_for_fragment();
  if (arrived_ && arrived_->means) apply_means(*arrived_);
  arrived_.reset();
  state_.step = 0;
  ++state_.round;
}

void Rounds::apply_means(const ArrivedFragment& arrived) {
  const at::NoGradGuard no_grad;
  const std::vector<size_t> parameters = own(setup_.fragments[arrived.fragment]);
  step_anchors(arrived, parameters);
  write_parameters(arrived.fragment, parameters);
}

void Rounds::step_anchors(const ArrivedFragment& arrived, const std::vector<size_t>& parameters) {
  const std::vector<at::Tensor>& means = *arrived.means;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor anchor = setup_.parameters[parameters[i]].anchor.detach();
    if (setup_.options.has_outer_step)
      gradients.push_back(means[i].to(anchor.options()));
    else if (sends_differences())
      anchor.copy_(anchor - means[i]);
    else
      anchor.copy_(means[i]);
  }
  if (setup_.options.has_outer_step && !parameters.empty())
    setup_.door->step_outer(arrived.fragment, parameters, gradients);
}

void Rounds::write_parameters(size_t fragment, const std::vector<size_t>& parameters) {
  const double alpha = setup_.options.fragment_update_alpha;
  setup_.door->write([&] {
    const std::vector<at::Tensor> values = setup_.door->values(parameters);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor anchor = setup_.parameters[parameters[i]].anchor.detach();
      const at::Tensor value = values[i].detach();
      value.copy_(alpha == 0 ? anchor : at::lerp(anchor, value, alpha));
    }
    spread(setup_.fragments[fragment]);
  });
}

// Where each rank of a worker has all of each parameter, gives the others what one has written.
void Rounds::spread(const Fragment& fragment) {
  if (!setup_.ranks.have_all || !setup_.ranks.inside) return;
  const std::vector<at::Tensor> values = setup_.door->values(fragment);
  for (int64_t sender = 0; sender < setup_.ranks.inside->world(); ++sender) {
    std::vector<at::Tensor> here, contiguous;
    for (size_t i = 0; i < fragment.size(); ++i) {
      if (setup_.parameters[fragment[i]].sender != sender) continue;
      here.push_back(values[i].detach());
      contiguous.push_back(here.back().contiguous());
    }
    if (here.empty()) continue;
    setup_.ranks.inside->broadcast(contiguous, sender, "parameters of a round").wait();
    for (size_t i = 0; i < here.size(); ++i)
      if (!contiguous[i].is_same(here[i])) here[i].copy_(contiguous[i]);
  }
}

void Rounds::abandon(const std::string& reason) noexcept {
  if (!failure_.empty()) return;
  failure_ = reason.empty() ? "an exception that says nothing" : reason;
  average_.abandon();
  leaving_.reset();
  const std::string text =
      error_text(kRoundsArea, c10::str("round ", state_.round, " was abandoned: ", failure_),
                 workers().rank_of(), "Mend its cause, and begin again from a checkpoint.");
  announce(&workers(), text);
  if (setup_.ranks.have_all) announce(setup_.ranks.inside.get(), text);
}

void Rounds::set_weight(double weight) {
  TORCH_CHECK_VALUE(
      std::isfinite(weight) && weight >= 0,
      error_text(kRoundsArea, c10::str("got weight=", weight, ", expected 0 or more"),
                 workers().rank_of(), "Pass this worker's share of the next average."));
  state_.weight = weight;
}

void Rounds::restore(const RoundState& state, std::optional<ArrivedFragment> arrived) {
  state_ = state;
  arrived_ = std::move(arrived);
  leaving_.reset();
  average_.abandon();
  has_agreed_ = true;
}

void Rounds::check_usable() const {
  TORCH_CHECK(failure_.empty(),
              error_text(kRoundsArea, "got a step of rounds that have failed: " + failure_,
                         workers().rank_of(),
                         "Make the rounds anew, and load the last checkpoint into them."));
}

std::string Rounds::label_of(size_t fragment) const {
  const Fragment& indices = setup_.fragments[fragment];
  if (indices.empty()) return c10::str("round ", state_.round);
  return c10::str("round ", state_.round, ": ", setup_.parameters[indices.front()].name, " .. ",
                  setup_.parameters[indices.back()].name);
}

}  // namespace trireme
