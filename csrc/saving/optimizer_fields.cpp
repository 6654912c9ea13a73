#include <trireme/saving/optimizer_fields.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace trireme {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

template <typename Options, typename State>
class FieldsOf : public OptimizerFields {
 public:
  std::unique_ptr<OptimizerParamState> make_state() const final {
    return std::make_unique<State>();
  }
  bool keeps(const OptimizerParamState& state) const final {
    return typeid(state) == typeid(State);
  }
  std::vector<std::pair<const char*, bool>> fixed_options() const override {
    return {{"maximize", false}};
  }

 protected:
  static Options& own(OptimizerOptions& options) { return static_cast<Options&>(options); }
  static const Options& own(const OptimizerOptions& options) {
    return static_cast<const Options&>(options);
  }
  static State& own(OptimizerParamState& state) { return static_cast<State&>(state); }
};

template <typename Options, typename State, bool kDecoupledWeightDecay>
class AdamFields final : public FieldsOf<Options, State> {
  using Base = FieldsOf<Options, State>;

 public:
  std::vector<OptionField> options(OptimizerOptions& options) const override {
    Options& own = Base::own(options);
    return {{"lr", &own.lr()},
            {"betas", &own.betas()},
            {"eps", &own.eps()},
            {"weight_decay", &own.weight_decay()},
            {"amsgrad", &own.amsgrad()}};
  }
  std::vector<std::pair<const char*, bool>> fixed_options() const override {
    return {{"maximize", false}, {"decoupled_weight_decay", kDecoupledWeightDecay}};
  }
  std::vector<StateField> state(OptimizerParamState& state,
                                const OptimizerOptions& options) const override {
    State& own = Base::own(state);
    return {{"step", &own.step()},
            {"exp_avg", &own.exp_avg()},
            {"exp_avg_sq", &own.exp_avg_sq()},
            {"max_exp_avg_sq", &own.max_exp_avg_sq(), Base::own(options).amsgrad()}};
  }
};

class SgdFields final : public FieldsOf<torch::optim::SGDOptions, torch::optim::SGDParamState> {
 public:
  std::vector<OptionField> options(OptimizerOptions& options) const override {
    auto& sgd = own(options);
    return {{"lr", &sgd.lr()},
            {"momentum", &sgd.momentum()},
            {"dampening", &sgd.dampening()},
            {"weight_decay", &sgd.weight_decay()},
            {"nesterov", &sgd.nesterov()}};
  }
  std::vector<StateField> state(OptimizerParamState& state,
                                const OptimizerOptions& /*options*/) const override {
    return {{"momentum_buffer", &own(state).momentum_buffer(), false}};
  }
};

class AdagradFields final
    : public FieldsOf<torch::optim::AdagradOptions, torch::optim::AdagradParamState> {
 public:
  std::vector<OptionField> options(OptimizerOptions& options) const override {
    auto& adagrad = own(options);
    return {{"lr", &adagrad.lr()},
            {"lr_decay", &adagrad.lr_decay()},
            {"weight_decay", &adagrad.weight_decay()},
            {"initial_accumulator_value", &adagrad.initial_accumulator_value()},
            {"eps", &adagrad.eps()}};
  }
  std::vector<StateField> state(OptimizerParamState& state,
                                const OptimizerOptions& /*options*/) const override {
    return {{"step", &own(state).step()}, {"sum", &own(state).sum()}};
  }
  bool needs_states() const override { return true; }
};

class RmspropFields final
    : public FieldsOf<torch::optim::RMSpropOptions, torch::optim::RMSpropParamState> {
 public:
  std::vector<OptionField> options(OptimizerOptions& options) const override {
    auto& rmsprop = own(options);
    return {{"lr", &rmsprop.lr()},
            {"alpha", &rmsprop.alpha()},
            {"eps", &rmsprop.eps()},
            {"weight_decay", &rmsprop.weight_decay()},
            {"momentum", &rmsprop.momentum()},
            {"centered", &rmsprop.centered()}};
  }
  std::vector<StateField> state(OptimizerParamState& state,
                                const OptimizerOptions& options) const override {
    auto& rmsprop = own(state);
    return {{"step", &rmsprop.step()},
            {"square_avg", &rmsprop.square_avg()},
            {"momentum_buffer", &rmsprop.momentum_buffer(), own(options).momentum() > 0},
            {"grad_avg", &rmsprop.grad_avg(), own(options).centered()}};
  }
};

template <typename Optimizer, typename Fields>
const OptimizerFields* fields_if(const torch::optim::Optimizer& optimizer) {
  static const Fields fields;
  return dynamic_cast<const Optimizer*>(&optimizer) != nullptr ? &fields : nullptr;
}

}  // namespace

const OptimizerFields* fields_of(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (const auto* fields =
          fields_if<Adam, AdamFields<AdamOptions, AdamParamState, false>>(optimizer))
    return fields;
  if (const auto* fields =
          fields_if<AdamW, AdamFields<AdamWOptions, AdamWParamState, true>>(optimizer))
    return fields;
  if (const auto* fields = fields_if<SGD, SgdFields>(optimizer)) return fields;
  if (const auto* fields = fields_if<Adagrad, AdagradFields>(optimizer)) return fields;
  return fields_if<RMSprop, RmspropFields>(optimizer);
}

}  // namespace trireme
