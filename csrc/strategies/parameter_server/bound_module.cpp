#include <trireme/strategies/parameter_server/bound_module.h>

#include <trireme/common/dtype_name.h>
#include <trireme/common/exception_text.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <utility>

// See [Note: parameters in the memory of a table] in bound_module.h.

namespace trireme::ps {
namespace {

constexpr WorkerMeeting::Texts kWritingTexts{
    .at_other_clock = "Begin to write after as many clocks on all workers.",
    .has_failed = " has left it by an exception: ",
    .after_failure = "Look for the error of that worker.",
    .has_gone = " has gone while it wrote, expected that it ends",
    .after_end = "Write once more: the values are mixed."};

}  // namespace

BoundModule::BoundModule(Parts parts)
    : parts_(std::move(parts)),
      meeting_({parts_.board,
                [&memory = parts_.memory](int64_t worker) -> MeetingLine& {
                  return memory.marks(worker).writing;
                },
                kWritingTexts}) {
  for (size_t i = 0; i < parts_.parameters.size(); ++i)
    places_.push_back(parts_.store->whole(static_cast<int64_t>(i)));
  show_values();
}

void BoundModule::show_values() {
  for (size_t i = 0; i < places_.size(); ++i) parts_.parameters[i].set_data(places_[i]);
  parts_.store->snapshot_versions(parts_.parameters);
}

void BoundModule::check_unchanged(std::string_view verb) {
  if (is_writing_) return;
  const auto refuse = [&](size_t i, const char* what, const char* next_step) {
    const std::string text =
        c10::str(verb, ": parameter '", parts_.names[i], "' of table '", parts_.table, "' ", what);
    TORCH_CHECK(false, error_text(kPsArea, text, parts_.board->where(), next_step));
  };
  const std::vector<int64_t> changed = parts_.store->changed_outside(parts_.parameters);
  if (!changed.empty()) {
    parts_.store->snapshot_versions(parts_.parameters);
    refuse(static_cast<size_t>(changed.front()),
           "was changed in place, expected that only the table writes it",
           "Let push() step it, or write it inside writing().");
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!parts_.store->holds(static_cast<int64_t>(i), parts_.parameters[i]))
      refuse(i, "lies in other memory, expected that of the table",
             "Move or cast the module before the server is made.");
  }
}

void BoundModule::end_reading() {
  is_readable_ = false;
  HostStore::bump_versions(parts_.parameters);
  parts_.store->snapshot_versions(parts_.parameters);
}

void BoundModule::unbind() {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (parts_.store->holds(static_cast<int64_t>(i), parts_.parameters[i]))
      parts_.parameters[i].set_data(places_[i].clone());
  }
}

void BoundModule::refresh() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < places_.size(); ++i) {
    at::Tensor& parameter = parts_.parameters[i];
    if (parameter.sizes() == places_[i].sizes()) parameter.copy_(places_[i]);
  }
}

// --- writing -------------------------------------------------------------------------------------

WaitContext BoundModule::context() const {
  return {[this] {
            return c10::str("writing of table '", parts_.table, "' at clock ",
                            parts_.board->clock());
          },
          "writing"};
}

void BoundModule::refuse_joined() const {
  for (int64_t worker = 0; worker < parts_.board->workers(); ++worker)
    TORCH_CHECK_VALUE(
        !parts_.board->line(worker).has_joined() || parts_.board->is_gone(worker),
        error_text(kPsArea,
                   c10::str(context().text(), ": got ", parts_.board->name_of(worker),
                            ", which has no module to write, expected ranks of the group alone"),
                   parts_.board->where(), "Write before workers join."));
}

void BoundModule::begin_writing(const std::function<void()>& prepare) {
  refuse_joined();
  const WaitContext context = this->context();
  try {
    meeting_.begin({.context = context, .prepare = prepare});
  } catch (const std::exception& error) {
    meeting_.fail(what_of(error));
    meeting_.end();
    throw;
  }
  is_writing_ = true;
  for (size_t i = 0; i < places_.size(); ++i) parts_.parameters[i].set_data(places_[i].clone());
}

// Refuses a parameter whose shape or dtype is not the table's, on this worker and on all others.
void BoundModule::check_written() {
  for (size_t i = 0; i < places_.size(); ++i) {
    const at::Tensor& parameter = parts_.parameters[i];
    const at::Tensor& place = places_[i];
    if (parameter.sizes() == place.sizes() && parameter.scalar_type() == place.scalar_type())
      continue;
    const std::string got = c10::str(
        context().text(), ": got '", parts_.names[i], "' as ", dtype_name(parameter.scalar_type()),
        " ", parameter.sizes(), ", expected ", dtype_name(place.scalar_type()), " ", place.sizes());
    abandon_writing(got);
    TORCH_CHECK_VALUE(false,
                      error_text(kPsArea, got, parts_.board->where(),
                                 "Write values; a table keeps the shapes it was made with."));
  }
}

void BoundModule::end_writing() {
  TORCH_INTERNAL_ASSERT(is_writing_);
  check_written();
  const at::NoGradGuard no_grad;
  const WaitContext context = this->context();
  const auto copy = [this] {
    for (size_t i = 0; i < places_.size(); ++i) places_[i].copy_(parts_.parameters[i]);
  };
  try {
    meeting_.work({.context = context, .work = copy, .works_in_time = true});
  } catch (const std::exception& error) {
    abandon_writing(what_of(error));
    throw;
  }
  finish_writing();
}

void BoundModule::finish_writing() {
  is_writing_ = false;
  show_values();
  meeting_.end();
}

void BoundModule::abandon_writing(const std::string& reason) noexcept {
  if (!is_writing_) return;
  meeting_.fail(reason);
  finish_writing();
}

}  // namespace trireme::ps
