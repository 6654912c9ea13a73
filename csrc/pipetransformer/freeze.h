#pragma once

#include <trireme/common/export.h>
#include <trireme/pipetransformer/freeze_course.h>
#include <trireme/pipetransformer/frozen_layers.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace trireme {

// Freezes the layers of a model from the input on while it trains; see [Note: freezing from the
// bottom up] in freeze_rule.h.
//
//   trireme::Freeze freeze(model, {{"embed", "block0"}, "block1", "block2"}, {}, &optimizer);
//   for (epochs) {
//     freeze.train();
//     for (batches) { ...; loss.backward(); freeze.step(); optimizer.step(); }
//     freeze.advance();
//   }
//
// `model` is plain or under any strategy; every rank makes one. A frozen layer has no gradients, so
// that neither weight decay nor momentum moves it, and nothing of it crosses. One thread at a time.
class TRIREME_API Freeze {
 public:
  // `layers`: from the input on. Those of a Sequential, or of the longest list of modules in the
  // model, if there are none. `optimizer`: of the parameters; it forgets what it keeps of frozen
  // ones. Both outlive this. Collective over the ranks that train the model. Throws ValueError on
  // all ranks for options and layers that cannot be used: an unknown name, a layer without
  // parameters, a parameter that a layer shares with another one, or with what is no layer, an
  // optimizer of other parameters.
  Freeze(std::shared_ptr<torch::nn::Module> model, const std::vector<FreezeLayer>& layers = {},
         FreezeOptions options = {}, torch::optim::Optimizer* optimizer = nullptr);
  template <typename Contained>
  Freeze(const torch::nn::ModuleHolder<Contained>& model,
         const std::vector<FreezeLayer>& layers = {}, FreezeOptions options = {},
         torch::optim::Optimizer* optimizer = nullptr)
      : Freeze(std::shared_ptr<torch::nn::Module>(model.ptr()), layers, std::move(options),
               optimizer) {}

  // Called after each backward, before gradients are clipped. Measures some. Throws ValueError
  // where a frozen layer has run in training mode: train() of this takes the place of the model's.
  void step();
  // Ends an interval, such as an epoch; returns how many layers are frozen from now on, the same on
  // all ranks. Collective. Throws ValueError on all ranks, and freezes nothing, where they have
  // come here by different ways.
  int64_t advance();
  // Trains layers again, so that `stay` stay frozen. On all ranks alike.
  void unfreeze(int64_t stay);
  // Does what the model's train() does, and leaves frozen layers in evaluation mode.
  void train(bool on = true);

  int64_t frozen() const { return course_->frozen(); }
  // Returns how many were frozen behind each advance().
  const std::vector<int64_t>& history() const { return course_->history(); }

  // Return and set how far freezing has come; load() freezes as many layers. What has been measured
  // in an interval that has not ended is no part of it.
  const FreezeState& state() const { return course_->state(); }
  void load(const FreezeState& state);
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  void follow();

  std::shared_ptr<FrozenLayers> layers_;
  std::shared_ptr<FreezeCourse> course_;
};

}  // namespace trireme
