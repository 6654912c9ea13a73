#include <trireme/kernels/optimizer_spec.h>

#include <trireme/kernels/span.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <utility>

namespace trireme {
namespace {

// The name and value of an option.
using NamedOption = std::pair<const char*, double>;

std::string call_text(const char* name, std::initializer_list<NamedOption> options) {
  std::string text = std::string(name) + "(";
  for (const auto& [option, value] : options)
    text += (text.back() == '(' ? "" : ", ") + std::string(option) + "=" + digits_of(value);
  return text + ")";
}

template <typename Spec>
std::string adam_text(const char* name, const Spec& spec) {
  return call_text(name, {{"lr", spec.lr},
                          {"beta1", spec.beta1},
                          {"beta2", spec.beta2},
                          {"eps", spec.eps},
                          {"weight_decay", spec.weight_decay}});
}

struct TextOf {
  std::string operator()(const SgdSpec& spec) const {
    return call_text(
        "SGD", {{"lr", spec.lr}, {"momentum", spec.momentum}, {"weight_decay", spec.weight_decay}});
  }
  std::string operator()(const AdamSpec& spec) const { return adam_text("Adam", spec); }
  std::string operator()(const AdamWSpec& spec) const { return adam_text("AdamW", spec); }
  std::string operator()(const AdagradSpec& spec) const {
    return call_text("Adagrad", {{"lr", spec.lr}, {"eps", spec.eps}});
  }
  std::string operator()(const RowwiseAdagradSpec& spec) const {
    return call_text("RowwiseAdagrad", {{"lr", spec.lr}, {"eps", spec.eps}});
  }
  std::string operator()(const SumSpec&) const { return "Sum()"; }
};

struct OptionsOf {
  using Numbers = std::vector<double>;
  template <typename Spec>
  static Numbers of_adam(const Spec& spec) {
    return {spec.lr, spec.beta1, spec.beta2, spec.eps, spec.weight_decay};
  }

  Numbers operator()(const SgdSpec& spec) const {
    return {spec.lr, spec.momentum, spec.weight_decay};
  }
  Numbers operator()(const AdamSpec& spec) const { return of_adam(spec); }
  Numbers operator()(const AdamWSpec& spec) const { return of_adam(spec); }
  Numbers operator()(const AdagradSpec& spec) const { return {spec.lr, spec.eps}; }
  Numbers operator()(const RowwiseAdagradSpec& spec) const { return {spec.lr, spec.eps}; }
  Numbers operator()(const SumSpec&) const { return {}; }
};

template <typename Spec>
Spec adam_of(const std::vector<double>& options) {
  return {options[0], options[1], options[2], options[3], options[4]};
}

// Finds an option that is out of its range.
struct WrongOption {
  using Found = std::string;

  static Found negative(std::initializer_list<NamedOption> options) {
    for (const auto& [name, value] : options)
      if (!(value >= 0) || std::isinf(value)) return std::string(name) + " >= 0";
    return {};
  }
  template <typename Spec>
  static Found of_adam(const Spec& spec) {
    for (const auto& [name, value] : {NamedOption{"beta1", spec.beta1}, {"beta2", spec.beta2}})
      if (!(value >= 0 && value < 1)) return std::string(name) + " in [0, 1)";
    return negative({{"lr", spec.lr}, {"eps", spec.eps}, {"weight_decay", spec.weight_decay}});
  }

  Found operator()(const SgdSpec& spec) const {
    return negative(
        {{"lr", spec.lr}, {"momentum", spec.momentum}, {"weight_decay", spec.weight_decay}});
  }
  Found operator()(const AdamSpec& spec) const { return of_adam(spec); }
  Found operator()(const AdamWSpec& spec) const { return of_adam(spec); }
  Found operator()(const AdagradSpec& spec) const {
    return negative({{"lr", spec.lr}, {"eps", spec.eps}});
  }
  Found operator()(const RowwiseAdagradSpec& spec) const {
    return negative({{"lr", spec.lr}, {"eps", spec.eps}});
  }
  Found operator()(const SumSpec&) const { return {}; }
};

struct Stepper {
  const OptimizerSegment& segment;
  SegmentDtypes dtypes;
  const SpecStep& step;

  void operator()(const SgdSpec& spec) const {
    SgdStepOptions options;
    options.lr = step.lr;
    options.momentum = spec.momentum;
    options.weight_decay = spec.weight_decay;
    options.first_step = step.step == 1;
    SgdScalars scalars = sgd_scalars(options);
    scalars.grad_factor = step.factor;
    sgd_segment(segment, dtypes, scalars);
  }
  void operator()(const AdamSpec& spec) const { step_adam(spec, /*decoupled=*/false); }
  void operator()(const AdamWSpec& spec) const { step_adam(spec, /*decoupled=*/true); }
  void operator()(const AdagradSpec& spec) const {
    AdagradScalars scalars = adagrad_scalars({step.lr, spec.eps});
    scalars.grad_factor = step.factor;
    adagrad_segment(segment, dtypes, scalars);
  }
  void operator()(const RowwiseAdagradSpec& spec) const {
    AdagradScalars scalars = adagrad_scalars({step.lr, spec.eps});
    scalars.grad_factor = step.factor;
    rowwise_adagrad_row(segment, dtypes, scalars);
  }
  void operator()(const SumSpec&) const {
    scaled_add({segment.param, dtypes.param, segment.numel},
               ConstSpan{segment.grad, dtypes.grad, segment.numel}, step.factor);
  }

  template <typename Spec>
  void step_adam(const Spec& spec, bool decoupled) const {
    AdamStepOptions options;
    options.lr = step.lr;
    options.beta1 = spec.beta1;
    options.beta2 = spec.beta2;
    options.eps = spec.eps;
    options.weight_decay = spec.weight_decay;
    options.decoupled_weight_decay = decoupled;
    AdamScalars scalars = adam_scalars(options, static_cast<double>(step.step));
    scalars.grad_factor = step.factor;
    adam_segment(segment, dtypes, scalars);
  }
};

}  // namespace

std::string digits_of(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  std::array<char, 32> shorter{};
  std::snprintf(shorter.data(), shorter.size(), "%g", value);
  return std::strtod(shorter.data(), nullptr) == value ? shorter.data() : text.data();
}

std::string complaint_about(const OptimizerSpec& spec) {
  const std::string expected = std::visit(WrongOption{}, spec);
  return expected.empty() ? std::string() : "got " + to_string(spec) + ", expected " + expected;
}

std::string to_string(const OptimizerSpec& spec) { return std::visit(TextOf{}, spec); }

std::string name_of(const OptimizerSpec& spec) {
  const std::string text = to_string(spec);
  return text.substr(0, text.find('('));
}

std::vector<double> options_of(const OptimizerSpec& spec) { return std::visit(OptionsOf{}, spec); }

std::optional<OptimizerSpec> optimizer_spec_of(std::string_view name,
                                               const std::vector<double>& options) {
  const auto is = [&](std::string_view expected, size_t count) {
    return name == expected && options.size() == count;
  };
  if (is("SGD", 3)) return SgdSpec{options[0], options[1], options[2]};
  if (is("Adam", 5)) return adam_of<AdamSpec>(options);
  if (is("AdamW", 5)) return adam_of<AdamWSpec>(options);
  if (is("Adagrad", 2)) return AdagradSpec{options[0], options[1]};
  if (is("RowwiseAdagrad", 2)) return RowwiseAdagradSpec{options[0], options[1]};
  if (is("Sum", 0)) return SumSpec{};
  return std::nullopt;
}

bool has_learning_rate(const OptimizerSpec& spec) { return !std::holds_alternative<SumSpec>(spec); }

double learning_rate_of(const OptimizerSpec& spec) {
  return std::visit(
      [](const auto& chosen) {
        if constexpr (requires { chosen.lr; }) {
          return chosen.lr;
        } else {
          return 1.0;
        }
      },
      spec);
}

bool is_rowwise(const OptimizerSpec& spec) {
  return std::holds_alternative<RowwiseAdagradSpec>(spec);
}

std::vector<std::string> names_of_states(const OptimizerSpec& spec) {
  if (const auto* sgd = std::get_if<SgdSpec>(&spec)) {
    if (sgd->momentum == 0) return {};
    return {"momentum_buffer"};
  }
  if (std::holds_alternative<SumSpec>(spec)) return {};
  if (std::holds_alternative<AdagradSpec>(spec) || is_rowwise(spec)) return {"sum"};
  return {"exp_avg", "exp_avg_sq"};
}

int64_t count_states(const OptimizerSpec& spec) {
  return static_cast<int64_t>(names_of_states(spec).size());
}

void step_segment(const OptimizerSpec& spec, const OptimizerSegment& segment, SegmentDtypes dtypes,
                  const SpecStep& step) {
  std::visit(Stepper{segment, dtypes, step}, spec);
}

}  // namespace trireme
