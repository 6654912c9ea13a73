#pragma once

#include <trireme/strategies/pipeline/gradients/replicas.h>
#include <trireme/strategies/pipeline/gradients/stage_strategies.h>
#include <trireme/strategies/pipeline/gradients/step_gradients.h>
#include <trireme/strategies/pipeline/gradients/tied_parameters.h>
#include <trireme/strategies/pipeline/gradients/unlisted_gradients.h>
#include <trireme/strategies/pipeline/runner.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Finishes the gradients that a rank makes: averages them over replicas of the pipeline, sums them
// over stages that share parameters, divides them by the number of micro-batches, and adds them to
// what .grad held. Gradients of parameters that belong to a strategy are left to it.
//
// `place` counts the stages of this rank. One thread at a time.
class RankGradients {
 public:
  // Collective over the communicator and options.replicas. Gives copies and tied parameters the
  // values of the first one. The communicator outlives it.
  RankGradients(const PipelineSchedule& schedule, const std::vector<PipelineStageRequest>& stages,
                Communicator& communicator, const PipelineEngineOptions& options);

  // Sets the order in which stages complete their gradients.
  void set_order(std::vector<size_t> places) { order_ = std::move(places); }
  // Throws ValueError where a tied parameter is missing.
  void set_parameters(size_t place, NamedParameters parameters,
                      std::vector<std::shared_ptr<DeferredSync>> strategies);
  void set_buffers(std::vector<at::Tensor> buffers) { buffers_ = std::move(buffers); }
  std::vector<at::Tensor> later_copies() const { return tied_.later_copies(); }

  void recover();
  void forget_before(int64_t step) { tied_.forget_before(step); }

  bool has_strategies() const;
  // Finds strategies and holds them back until end_step(). Returns whether there are any.
  bool find_strategies();
  // `divides` says whether gradients are yet to be divided by the number of micro-batches; if not,
  // losses were.
  struct Step {
    int64_t step = 0;
    bool synchronizes = true;
    bool divides = true;
  };
  void begin_step(const Step& step);
  // Returns the gradients of leaves that layers use but do not register.
  UnlistedGradients& unlisted() { return *unlisted_; }
  void before_last_backward(size_t place) { strategies_[place].before_last_backward(); }
  void after_last_backward(size_t place);
  // Finishes the sums that need other ranks.
  void finish_sums();
  void end_step();
  void abandon(const std::string& why) noexcept;

  SentCodes sent() const { return replicas_.sent(); }
  std::vector<KeptCodes> kept_codes() const { return replicas_.kept_codes(); }

 private:
  // The parameters of one stage of this rank.
  struct StageParameters {
    int64_t stage = 0;
    std::vector<at::Tensor> all = {};
    std::vector<std::string> names = {};    // of all
    std::vector<at::Tensor> own = {};       // without those of strategies
    std::vector<at::Tensor> complete = {};  // own ones, not tied, that no later stage has
  };

  void list_for_unlisted();
  void name_parameters();
  void spread_values(const std::vector<PipelineStageRequest>& stages);
  void list_complete();
  void average(const std::vector<at::Tensor>& parameters, const std::string& label);
  int64_t divisor() const { return step_.divides ? micro_batches_ : 1; }

  int64_t micro_batches_;
  bool scale_grads_;
  bool leads_strategies_;
  std::vector<StageParameters> stages_;
  std::vector<StageStrategies> strategies_;
  std::vector<size_t> order_;
  TiedParameters tied_;
  PipelineReplicas replicas_;
  std::vector<at::Tensor> buffers_;
  StepGradients gradients_;
  std::shared_ptr<UnlistedGradients> unlisted_;
  bool ends_unlisted_;  // else threads share them, and PipelineThreads ends them
  Step step_;
  bool buffers_may_differ_ = false;  // the last step synchronized: the next one broadcasts buffers
};

}  // namespace trireme
