#pragma once

#include <trireme/activation/activation_cache.h>
#include <trireme/activation/cached_prefix.h>
#include <trireme/common/export.h>
#include <trireme/pipetransformer/elastic_course.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/pipeline/pipeline_module.h>
#include <trireme/strategies/pipeline/pipeline_options.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace trireme {

// What a step runs, whatever the plan is.
struct RunnerRequest {
  torch::nn::Sequential layers;
  std::string schedule = "1f1b";
  PipelineLoss loss = {};
  std::shared_ptr<ActivationCache> cache = nullptr;
};

// Computes steps under one plan: replicas of a pipeline; or, where a pipeline has one rank,
// DistributedDataParallel behind the frozen layers. With a cache these are a CachedPrefix, as far
// as the first rank of a pipeline holds them.
class PlanRunner {
 public:
  // For the present plan of `course`. `frozen`: layers, from the input on. Collective.
  PlanRunner(const RunnerRequest& request, const ElasticCourse& course, int64_t frozen);
  ~PlanRunner();
  PlanRunner(const PlanRunner&) = delete;
  PlanRunner& operator=(const PlanRunner&) = delete;

  // Leaves in .grad of this rank's layers the average over the global batch, of which it takes its
  // own rows; returns the loss of its pipeline. Collective.
  at::Tensor step(const at::Tensor& input, const at::Tensor& ids, const at::Tensor& target);

  // Returns the loss of its pipeline for its own rows, keeping no graph; reads no cache.
  // Collective.
  at::Tensor evaluate(const at::Tensor& input, const at::Tensor& target);

  // Returns the options of a pipeline under a plan.
  static PipelineOptions options_for(const ElasticPlan& plan, const std::string& schedule,
                                     int64_t micro_batches);

 private:
  class RunPipeline;

  void make_pipeline(const ElasticCourse& course);
  void make_copies(const ElasticCourse& course);
  at::Tensor front(const at::Tensor& input, const at::Tensor& ids);
  at::Tensor own(const at::Tensor& all) const;

  RunnerRequest request_;
  int64_t frozen_;
  IndexRange rows_;
  CachedPrefix prefix_{nullptr};
  // Whether a pipeline is evaluated, which asks for no ids.
  std::shared_ptr<bool> is_evaluating_ = std::make_shared<bool>(false);
  std::shared_ptr<RunPipeline> pipeline_;  // null for pipelines of one rank
  torch::nn::Sequential rest_{nullptr};    // behind the frozen layers
  std::shared_ptr<DistributedDataParallelImpl<torch::nn::Sequential>> copies_;  // null for one rank
};

}  // namespace trireme
