#include <trireme/pipetransformer/freeze.h>

#include <trireme/comm/run_together.h>
#include <trireme/common/error.h>

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <exception>
#include <optional>
#include <utility>

namespace trireme {
namespace {

// What one rank cannot use no rank does.
std::shared_ptr<FrozenLayers> make_together(const std::shared_ptr<torch::nn::Module>& model,
                                            const std::vector<FreezeLayer>& layers,
                                            torch::optim::Optimizer* optimizer, bool evaluates) {
  std::shared_ptr<FrozenLayers> made;
  const auto make = [&] {
    made = std::make_shared<FrozenLayers>(model, layers, optimizer, evaluates);
  };
  const auto ranks = FrozenLayers::ranks_of(*model);
  if (!ranks) {
    make();
    return made;
  }
  const auto failure = run_together(make, *ranks, ranks->device());
  if (failure && failure->own) std::rethrow_exception(failure->own);
  TORCH_CHECK_VALUE(!failure, error_text("freeze",
                                         c10::str("got what rank ", failure ? failure->rank : 0,
                                                  " cannot use: ", failure ? failure->text : ""),
                                         ranks->rank_of(), "Give all ranks the same."));
  return made;
}

}  // namespace

Freeze::Freeze(std::shared_ptr<torch::nn::Module> model, const std::vector<FreezeLayer>& layers,
               FreezeOptions options, torch::optim::Optimizer* optimizer)
    : layers_(make_together(model, layers, optimizer, options.eval_frozen)),
      course_(std::make_shared<FreezeCourse>(layers_->names(), std::move(options),
                                             FrozenLayers::ranks_of(*model))) {}

void Freeze::step() {
  if (course_->options().eval_frozen && frozen() > 0) {
    const std::string name = layers_->first_in_training(frozen());
    TORCH_CHECK_VALUE(name.empty(),
                      error_text("freeze", "got frozen layer '" + name + "' in training mode", {},
                                 "Call train() of the Freeze in place of the model's, or pass "
                                 "eval_frozen=false."));
  }
  if (course_->begin_step()) course_->measure(layers_->gradients(frozen()));
}

int64_t Freeze::advance() {
  course_->advance(layers_->train_alone());
  follow();
  return frozen();
}

void Freeze::unfreeze(int64_t stay) {
  const int64_t before = frozen();
  course_->unfreeze(stay);
  follow();
  if (course_->options().eval_frozen)
    layers_->set_training(stay, before, layers_->model().is_training());
}

void Freeze::train(bool on) {
  layers_->model().train(on);
  if (course_->options().eval_frozen) layers_->set_training(0, frozen(), false);
}

void Freeze::follow() {
  layers_->freeze(frozen());
  if (course_->options().eval_frozen) layers_->set_training(0, frozen(), false);
}

void Freeze::load(const FreezeState& state) {
  const int64_t before = frozen();
  course_->load(state);
  follow();
  if (course_->options().eval_frozen && before > frozen())
    layers_->set_training(frozen(), before, layers_->model().is_training());
}

void Freeze::save(torch::serialize::OutputArchive& archive) const {
  archive.write("layers", c10::IValue(c10::List<std::string>(state().layers)));
  archive.write("frozen", c10::IValue(state().frozen));
  archive.write("history", c10::IValue(c10::List<int64_t>(state().history)));
}

void Freeze::load(torch::serialize::InputArchive& archive) {
  c10::IValue layers;
  c10::IValue frozen;
  c10::IValue history;
  archive.read("layers", layers);
  archive.read("frozen", frozen);
  archive.read("history", history);
  FreezeState state{{}, frozen.toInt(), history.toIntVector()};
  for (const c10::IValue& name : layers.toListRef()) state.layers.push_back(name.toStringRef());
  load(state);
}

}  // namespace trireme
