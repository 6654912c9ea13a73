#include <trireme/strategies/pipeline/pipeline.h>

#include <trireme/strategies/pipeline/partition.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>

#include <numeric>
#include <utility>

namespace trireme {
namespace {

// Returns the device of each stage; none where options name none.
std::vector<c10::Device> devices_of_stages(const PipelineOptions& options,
                                           const PipelineSchedule& schedule) {
  std::vector<c10::Device> devices;
  if (options.devices.empty()) return devices;
  for (const int64_t rank : schedule.stage_rank)
    devices.push_back(options.devices[static_cast<size_t>(rank)]);
  return devices;
}

// Returns the number of layers in front of each stage, and at the end that of all. Throws
// ValueError where `balance` does not add up to `layers`.
std::vector<int64_t> stage_bounds(const PipelineOptions& options, int64_t layers, int64_t stages) {
  std::vector<int64_t> balance = options.balance;
  if (balance.empty()) {
    balance = partition({std::vector<double>(static_cast<size_t>(layers), 1.0), stages});
  }
  const int64_t sum = std::accumulate(balance.begin(), balance.end(), int64_t{0});
  bool is_cut = static_cast<int64_t>(balance.size()) == stages && sum == layers;
  for (const int64_t count : balance) is_cut = is_cut && count > 0;
  if (!is_cut) {
    refuse_pipeline(c10::str("got a balance of ", at::IntArrayRef(balance), " for ", layers,
                             " layers and ", stages, " stages"),
                    "Give each stage one layer or more, all layers in all.");
  }
  std::vector<int64_t> bounds{0};
  for (const int64_t count : balance) bounds.push_back(bounds.back() + count);
  return bounds;
}

// Finds parameters and buffers that a module has under several names: returns each name but the
// first, with the first.
std::unordered_map<std::string, std::string> find_names_in_whole(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  std::unordered_map<std::string, std::string> later;
  for (const auto& items : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : items) {
      if (!item.value().defined()) continue;
      const auto [known, is_first] =
          first.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
      if (!is_first) later[item.key()] = known->second;
    }
  }
  return later;
}

// Lists the parameters of all stages, those of other ranks too.
std::vector<StageTensors> tensors_of(const std::vector<PipelineLayer>& layers,
                                     const std::vector<int64_t>& bounds,
                                     const PipelineSchedule& schedule) {
  std::vector<StageTensors> stages;
  for (size_t stage = 0; stage < schedule.stage_rank.size(); ++stage) {
    StageTensors& found = stages.emplace_back();
    found.rank = schedule.stage_rank[stage];
    for (int64_t i = bounds[stage]; i < bounds[stage + 1]; ++i) {
      const PipelineLayer& layer = layers[static_cast<size_t>(i)];
      for (const auto& parameter : layer.module->named_parameters()) {
        found.names.push_back(layer.name + "." + parameter.key());
        found.tensors.push_back(parameter.value());
      }
    }
  }
  return stages;
}

}  // namespace

PipelineImpl::PipelineImpl(const torch::nn::Module& net, const std::vector<PipelineLayer>& layers,
                           std::shared_ptr<Communicator> communicator,
                           const PipelineOptions& options)
    : PipelineModule(communicator, options),
      checkpoint_(recomputation(options.checkpoint)),
      all_(options.ranks ? std::move(communicator) : ranks().communicator) {
  const auto count = static_cast<int64_t>(layers.size());
  PipelineSchedule schedule = schedule_of(options, schedule_ranks(options, ranks(), count));
  const std::vector<int64_t> bounds = stage_bounds(options, count, schedule.stages);
  devices_ = devices_of_stages(options, schedule);
  const std::vector<StageTensors> tensors = tensors_of(layers, bounds, schedule);
  names_in_whole_ = find_names_in_whole(net);
  refuse_meetings_in_stages(net, options);
  if (options.deferred_batch_norm) {
    DeferredBatchNorms all;  // other ranks refuse their layers here, too
    for (const PipelineLayer& layer : layers) all.add(layer.module, layer.name);
  }
  std::vector<PipelineStageRequest> requests;
  for (size_t stage = 0; stage < schedule.stage_rank.size(); ++stage) {
    if (options.ranks && schedule.stage_rank[stage] != ranks().communicator->rank()) continue;
    const Layers own(layers.begin() + bounds[stage], layers.begin() + bounds[stage + 1]);
    requests.push_back(request_of(static_cast<int64_t>(stage), own, bounds[stage]));
  }
  start(options, std::move(schedule), std::move(requests),
        {.skips = skips_of_stages(options.skips, bounds), .tied = find_tied(tensors)});
}

PipelineStageRequest PipelineImpl::request_of(int64_t stage, const Layers& layers, int64_t first) {
  PipelineStageRequest request;
  request.stage = stage;
  const int64_t last = first + static_cast<int64_t>(layers.size()) - 1;
  request.name = "layers " + std::to_string(first) + ".." + std::to_string(last);
  for (const PipelineLayer& layer : layers) {
    if (!devices_.empty()) layer.module->to(devices_[static_cast<size_t>(stage)]);
    add_layer(request, layer.name, layer.module);
  }
  request.function = function_of([layers](Tensors given) -> Tensors {
    at::Tensor value = std::move(given.at(0));
    for (const PipelineLayer& layer : layers) value = layer.forward(std::move(value));
    return {std::move(value)};
  });
  return request;
}

}  // namespace trireme
