#include <trireme/pipetransformer/elastic_course.h>

#include <trireme/common/error.h>
#include <trireme/pipetransformer/rank_agreement.h>
#include <trireme/strategies/pipeline/partition.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace trireme {
namespace {

std::string costs_text(const std::vector<double>& costs) {
  std::string text;
  for (const double cost : costs) text += " " + std::to_string(cost);
  return text.empty() ? " measured" : text;
}

bool are_costs(const std::vector<double>& costs) {
  return std::all_of(costs.begin(), costs.end(),
                     [](double cost) { return cost >= 0 && std::isfinite(cost); });
}

// Returns the sum, or the largest, of each number over the ranks.
std::vector<double> reduced(const std::vector<double>& numbers, ReduceOp op, Communicator* ranks,
                            const std::string& label) {
  if (ranks == nullptr) return numbers;
  at::Tensor all = at::tensor(numbers, at::kDouble).to(ranks->device());
  ranks->all_reduce({all}, op, label).wait();
  all = all.cpu();
  const auto* data = all.const_data_ptr<double>();
  return {data, data + all.numel()};
}

}  // namespace

ElasticCourse::ElasticCourse(ElasticOptions options, std::shared_ptr<Communicator> ranks)
    : options_(std::move(options)), ranks_(std::move(ranks)), costs_(options_.costs) {
  agree_on_ranks(
      {"options of an elastic run", "ranks with other options", "Make the run alike on all ranks."},
      [this] { return checked_text(); }, ranks_.get());
}

std::string ElasticCourse::checked_text() const {
  if (layers() < world())
    refuse(
        c10::str("got ", layers(), " layers for ", world(), " ranks, expected at least one each"),
        "Use fewer ranks, or cut the model into smaller layers.");
  if (options_.pipe && !options_.replicas)
    refuse("got pipe=True and replicas=False, which leaves ranks that are set free idle",
           "Pass both, or neither.");
  if (!costs_.empty() && (static_cast<int64_t>(costs_.size()) != layers() || !are_costs(costs_)))
    refuse(c10::str("got costs ", at::ArrayRef<double>(costs_), " for ", layers(),
                    " layers, expected one number >= 0 each"),
           "Leave them out, to have layers measured.");
  if (options_.global_batch < 1 || options_.chunks < 1)
    refuse(c10::str("got a global batch of ", options_.global_batch, " rows in ", options_.chunks,
                    " micro-batches"),
           "Pass numbers from 1 on.");
  for (int64_t ranks = world();; ranks /= 2) {
    check_division(ranks);
    if (!options_.pipe || ranks % 2 != 0) break;
  }
  std::string text = c10::str("global_batch=", options_.global_batch, "\nchunks=", options_.chunks,
                              "\npipe=", options_.pipe, "\nreplicas=", options_.replicas,
                              "\ncache=", options_.cached, "\ncosts", costs_text(costs_));
  for (const std::string& layer : options_.layers) text += "\nlayer '" + layer + "'";
  return text;
}

void ElasticCourse::check_division(int64_t ranks_per_pipeline) const {
  const int64_t replicas = world() / ranks_per_pipeline;
  const bool divides = ranks_per_pipeline == 1 ? options_.global_batch % replicas == 0
                                               : options_.chunks % replicas == 0 &&
                                                     options_.global_batch % options_.chunks == 0;
  if (divides) return;
  refuse(c10::str("got a global batch of ", options_.global_batch, " rows in ", options_.chunks,
                  " micro-batches, which the plan ", ranks_per_pipeline, " x ", replicas,
                  " does not divide"),
         "Use a batch that chunks divides, and chunks that the number of ranks divides.");
}

void ElasticCourse::refuse(const std::string& got, const std::string& next_step) const {
  const std::string under = plan_ ? " under the plan " + plan_text(*plan_) : "";
  refuse_elastic(got + under, ranks_.get(), next_step);
}

void ElasticCourse::take_costs(const std::vector<double>& forward,
                               const std::vector<double>& backward) {
  agree_on_ranks(
      {"measured costs", "ranks with other layers", "Make the run alike on all ranks."},
      [&] {
        for (const auto* costs : {&forward, &backward})
          if (static_cast<int64_t>(costs->size()) != layers() || !are_costs(*costs))
            refuse(c10::str("got costs ", at::ArrayRef<double>(*costs), " for ", layers(),
                            " layers, expected one number >= 0 each"),
                   "Measure each layer once.");
        return std::string("measured");
      },
      ranks_.get());
  std::vector<double> both = forward;
  both.insert(both.end(), backward.begin(), backward.end());
  both = reduced(both, ReduceOp::kSum, ranks_.get(), "costs of layers");
  for (double& cost : both) cost /= static_cast<double>(world());
  const auto middle = both.begin() + layers();
  forward_costs_.assign(both.begin(), middle);
  costs_ = forward_costs_;
  std::transform(middle, both.end(), costs_.begin(), costs_.begin(), std::plus<>());
}

ElasticPlan ElasticCourse::next_plan(int64_t frozen) const {
  if (needs_costs()) refuse("got no costs of layers yet", "Run a step first.");
  if (plan_ && !options_.pipe) return *plan_;
  ElasticPlanRequest request;
  request.costs = costs_;
  request.frozen = frozen;
  request.ranks = world();
  if (!options_.pipe) return fixed_plan();
  if (plan_ && frozen >= frozen_) request.before = plan_->ranks_per_pipeline;
  if (options_.cached) {
    request.frozen_factor = 0;
    request.keep_frozen_together = true;
  } else {
    request.frozen_costs = forward_costs_;
  }
  return elastic_plan(request);
}

ElasticPlan ElasticCourse::fixed_plan() const { return {world(), 1, partition({costs_, world()})}; }

void ElasticCourse::check_plan(const ElasticPlan& plan) const {
  const int64_t ranks = plan.ranks_per_pipeline;
  const bool fits_ranks = ranks >= 1 && ranks * plan.replicas == world() &&
                          static_cast<int64_t>(plan.balance.size()) == ranks;
  if (!fits_ranks)
    refuse(c10::str("got the plan ", plan_text(plan), " for ", world(), " ranks"),
           "Pass a plan of all ranks, with a part of the layers for each of a pipeline.");
  const bool has_parts =
      std::all_of(plan.balance.begin(), plan.balance.end(), [](int64_t part) { return part > 0; });
  if (!has_parts ||
      std::accumulate(plan.balance.begin(), plan.balance.end(), int64_t{0}) != layers())
    refuse(c10::str("got the plan ", plan_text(plan), " for ", layers(), " layers"),
           "Give every layer to one part, at least one to each.");
  check_division(ranks);
}

void ElasticCourse::adopt(const ElasticPlan& plan, int64_t frozen) {
  check_plan(plan);
  plan_ = plan;
  frozen_ = frozen;
}

const ElasticPlan& ElasticCourse::plan() const {
  if (!plan_) refuse("got no plan yet", "Run a step first.");
  return *plan_;
}

IndexRange ElasticCourse::rows() const {
  const int64_t count = options_.global_batch / plan().replicas;
  const int64_t replica = rank() / plan().ranks_per_pipeline;
  return {replica * count, (replica + 1) * count};
}

int64_t ElasticCourse::micro_batches() const {
  return plan().ranks_per_pipeline == 1 ? 1 : options_.chunks / plan().replicas;
}

IndexRange ElasticCourse::own_layers() const {
  const auto part = static_cast<size_t>(rank() % plan().ranks_per_pipeline);
  const auto begin = plan().balance.begin();
  const int64_t first = std::accumulate(begin, begin + static_cast<int64_t>(part), int64_t{0});
  return {first, first + plan().balance[part]};
}

std::string ElasticCourse::where() const {
  return c10::str("rank ", rank(), " of ", world(), " under the plan ", plan_text(plan()));
}

std::string ElasticCourse::batch_text(int64_t rows, const at::Tensor& ids) const {
  if (rows != options_.global_batch)
    refuse(c10::str("got a batch of ", rows, " rows, expected the global batch of ",
                    options_.global_batch),
           "Give every rank all rows of the step.");
  if (!ids.defined() && options_.cached)
    refuse("got a batch without ids, by which rows are cached",
           "Pass the numbers of the batch's samples, or no cache.");
  if (ids.defined() && (ids.dim() != 1 || ids.size(0) != rows || ids.scalar_type() != at::kLong))
    refuse(c10::str("got ids as ", ids.scalar_type(), " of sizes ", ids.sizes(), " for ", rows,
                    " rows"),
           "Pass one int64 for each row.");
  return plan_ ? plan_text(*plan_) : "no plan yet";
}

void ElasticCourse::check_batch(int64_t rows, const at::Tensor& ids) const {
  agree_on_ranks(
      {"batches of an elastic run", "ranks with other plans",
       "Call step(), end_epoch() and transform() alike on all ranks."},
      [&] { return batch_text(rows, ids); }, ranks_.get());
}

at::Tensor ElasticCourse::mean_loss(const at::Tensor& loss) const {
  if (plan().replicas == 1) return loss.detach();
  const at::NoGradGuard no_grad;
  const at::Tensor sum = loss.detach().to(at::kDouble);
  at::Tensor moved = sum.to(ranks_->device(), /*non_blocking=*/false, /*copy=*/true);
  ranks_->all_reduce({moved}, ReduceOp::kSum, "losses").wait();
  return moved.div_(static_cast<double>(world())).to(loss.options());
}

const ElasticEpoch& ElasticCourse::end_epoch(int64_t frozen, double seconds, int64_t hits) {
  const auto epoch = static_cast<int64_t>(history_.size());
  agree_on_ranks(
      {"epochs of an elastic run", "ranks with other histories",
       "Call end_epoch() and transform() alike on all ranks."},
      [&] { return c10::str("epoch ", epoch, ", frozen ", frozen, ", plan ", plan_text(plan())); },
      ranks_.get());
  const double slowest =
      reduced({seconds}, ReduceOp::kMax, ranks_.get(), "seconds of an epoch").front();
  const double all =
      reduced({static_cast<double>(hits)}, ReduceOp::kSum, ranks_.get(), "hits of an epoch")
          .front();
  history_.push_back({epoch, frozen, plan().ranks_per_pipeline, plan().replicas, slowest,
                      static_cast<int64_t>(all)});
  return history_.back();
}

}  // namespace trireme
