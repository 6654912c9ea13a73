#include <trireme/strategies/data_parallel/replica_pass.h>

#include <trireme/common/error.h>
#include <trireme/strategies/data_parallel/messages.h>
#include <trireme/strategies/data_parallel/replica_node.h>
#include <trireme/strategies/data_parallel/replicas.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace trireme {
namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

int64_t wrapped_dim(const at::Tensor& tensor, int64_t dim, const char* what) {
  const int64_t rank = tensor.dim();
  TORCH_CHECK_VALUE(-rank <= dim && dim < rank,
                    error_text(kDataParallelArea,
                               std::string("got dim ") + std::to_string(dim) + " for " + what +
                                   " of " + std::to_string(rank) + " dimensions, expected " +
                                   std::to_string(-rank) + " to " + std::to_string(rank - 1),
                               {}, "Give the dimension that holds the batch."));
  return dim < 0 ? dim + rank : dim;
}

std::string kind_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " (" << tensor.layout() << ")";
  return text.str();
}

// Copies to a device with streams are asynchronous; others are not, since the host may read them.
at::Tensor on(c10::Device device, const at::Tensor& tensor) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

// Returns whether two parts have equal sizes but along `dim`.
bool fit_together(const at::Tensor& a, const at::Tensor& b, int64_t dim) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i)
    if (i != dim && a.size(i) != b.size(i)) return false;
  return true;
}

}  // namespace

ReplicaPass::ReplicaPass(std::shared_ptr<Replicas> replicas, std::vector<Chunk> chunks)
    : replicas_(std::move(replicas)),
      chunks_(std::move(chunks)),
      records_(at::GradMode::is_enabled()),
      forward_ms_(chunks_.size()),
      backward_ms_(chunks_.size()) {}

std::vector<size_t> ReplicaPass::replicas() const {
  std::vector<size_t> replicas;
  for (const Chunk& chunk : chunks_) replicas.push_back(chunk.replica);
  return replicas;
}

std::vector<at::Tensor> ReplicaPass::scatter(const at::Tensor& input, int64_t dim) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !input._fw_grad(/*level=*/0).defined(),
      error_text(kDataParallelArea, "got an input with a forward-mode gradient, expected none", {},
                 "Use trireme.data_parallel(module, inputs), whose graph is one."));
  Input plan;
  plan.repeated = input.dim() == 0;
  std::vector<int64_t> rows;
  if (!plan.repeated) {
    plan.dim = wrapped_dim(input, dim, "an input");
    rows = rows_like(chunks_, input.size(plan.dim));
  }
  const bool records = records_ && input.requires_grad();
  std::vector<at::Tensor> parts;
  {
    const at::NoGradGuard no_grad;
    int64_t begin = 0;
    for (size_t position = 0; position < chunks_.size(); ++position) {
      at::Tensor part = input.detach();
      if (!plan.repeated) {
        part = part.is_sparse() ? part.narrow_copy(plan.dim, begin, rows[position])
                                : part.narrow(plan.dim, begin, rows[position]);
        begin += rows[position];
      }
      const c10::Device device = replicas_->tensors().module().devices[chunks_[position].replica];
      parts.push_back(on(device, part));
      // Each part counts versions of its own: else what one replica writes would look to the others
      // as if their input were.
      if (!part.is_inference())
        torch::autograd::impl::set_version_counter(parts.back(), c10::VariableVersion(0));
    }
  }
  scattered_.emplace_back(input, parts);
  if (!records) return parts;
  for (at::Tensor& part : parts) {
    // Views made without recording are differentiable views all the same; a leaf is none.
    plan.leaves.push_back(part.detach().set_requires_grad(true));
    part = computed_from(plan.leaves.back());
  }
  scattered_.back().second = plan.leaves;
  plan.device = input.device();
  inputs_.push_back(std::move(plan));
  next_edges_.push_back(torch::autograd::impl::gradient_edge(input));
  return parts;
}

ReplicaPass::Output ReplicaPass::plan_output(const std::vector<std::vector<at::Tensor>>& outputs,
                                             size_t i, const GatherOptions& options) const {
  Output plan;
  const at::Tensor& first = outputs.front()[i];
  for (size_t position = 0; position < outputs.size(); ++position) {
    const at::Tensor& part = outputs[position][i];
    const auto text = [&](const std::string& got, const std::string& expected) {
      return error_text(
          kDataParallelArea,
          "got " + got + " for output " + std::to_string(i) + " from " +
              replicas_->describe(chunks_[position].replica) + ", expected " + expected +
              " as from " + replicas_->describe(chunks_.front().replica),
          {}, "Return from forward what can be put together along the batch, or use loss=.");
    };
    TORCH_CHECK_VALUE(part.defined() == first.defined(), text("another structure", "the same"));
    if (!first.defined()) continue;
    TORCH_CHECK_TYPE(part.scalar_type() == first.scalar_type() && part.layout() == first.layout(),
                     text(kind_text(part), kind_text(first)));
    if (position == 0 && first.dim() > 0) plan.dim = wrapped_dim(first, options.dim, "an output");
    TORCH_CHECK_VALUE(fit_together(part, first, plan.dim),
                      text("shape " + shape_text(part), "one like " + shape_text(first)));
    plan.rows.push_back(first.dim() == 0 ? 1 : part.size(plan.dim));
    plan.differentiable |= records_ && part.requires_grad();
  }
  if (!first.defined()) return plan;
  plan.joined = first.dim() > 0 ? Joined::kAlongDim
                : !options.weights.empty() && (first.is_floating_point() || first.is_complex())
                    ? Joined::kWeighted
                    : Joined::kStacked;
  return plan;
}

at::Tensor ReplicaPass::join(const Output& plan, const std::vector<at::Tensor>& parts) const {
  const at::NoGradGuard no_grad;
  const c10::Device device = replicas_->options().output_device;
  std::vector<at::Tensor> here;
  for (const at::Tensor& part : parts) here.push_back(on(device, part.detach()));
  if (plan.joined == Joined::kAlongDim) return at::cat(here, plan.dim);
  if (plan.joined == Joined::kStacked) return at::stack(here);
  at::Tensor sum = here.front() * weights_.front();
  for (size_t position = 1; position < here.size(); ++position)
    sum.add_(here[position], weights_[position]);
  return sum;
}

std::vector<at::Tensor> ReplicaPass::gather(std::vector<std::vector<at::Tensor>> outputs,
                                            const GatherOptions& options) {
  TORCH_INTERNAL_ASSERT(outputs.size() == chunks_.size());
  pass_on_writes();
  weights_ = options.weights;
  outputs_ = std::move(outputs);
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> differentiable;
  for (size_t i = 0; i < outputs_.front().size(); ++i) {
    plans_.push_back(plan_output(outputs_, i, options));
    if (plans_.back().joined == Joined::kAbsent) {
      results.emplace_back();
      continue;
    }
    std::vector<at::Tensor> parts;
    for (const std::vector<at::Tensor>& of_replica : outputs_) parts.push_back(of_replica[i]);
    results.push_back(join(plans_.back(), parts));
    if (plans_.back().differentiable) differentiable.push_back(results.back());
  }
  if (differentiable.empty()) {
    release();
    return results;
  }
  for (const at::Tensor& parameter : replicas_->tensors().module().parameters)
    next_edges_.push_back(parameter.requires_grad()
                              ? torch::autograd::impl::gradient_edge(parameter)
                              : torch::autograd::Edge());
  set_replica_history(differentiable, std::move(next_edges_), shared_from_this());
  return results;
}

// Bumps the version of a caller's input into whose part a replica has written.
void ReplicaPass::pass_on_writes() {
  for (const auto& [input, parts] : scattered_)
    for (const at::Tensor& part : parts)
      if (!part.is_inference() && part._version() > 0 && part.has_storage() &&
          part.is_alias_of(input) && !input.is_inference()) {
        input.unsafeGetTensorImpl()->bump_version();
        break;
      }
  scattered_.clear();
}

at::Tensor ReplicaPass::part_of(const at::Tensor& gradient, const Output& plan,
                                size_t position) const {
  at::Tensor part;
  if (plan.joined == Joined::kAlongDim) {
    int64_t begin = 0;
    for (size_t before = 0; before < position; ++before) begin += plan.rows[before];
    part = gradient.narrow(plan.dim, begin, plan.rows[position]);
  } else if (plan.joined == Joined::kStacked) {
    part = gradient.select(0, static_cast<int64_t>(position));
  } else {
    part = gradient * weights_[position];
  }
  return on(replicas_->tensors().module().devices[chunks_[position].replica], part);
}

void ReplicaPass::run_backward(const std::vector<at::Tensor>& gradients,
                               const std::vector<size_t>& positions, bool keep_graph) {
  edge_list roots;
  variable_list root_gradients;
  for (const size_t position : positions) {
    size_t number = 0;
    for (size_t i = 0; i < plans_.size(); ++i) {
      if (!plans_[i].differentiable) continue;
      const at::Tensor& gradient = gradients[number++];
      const at::Tensor& output = outputs_[position][i];
      if (!gradient.defined() || !output.requires_grad()) continue;
      roots.push_back(torch::autograd::impl::gradient_edge(output));
      root_gradients.push_back(part_of(gradient, plans_[i], position));
    }
  }
  if (roots.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, keep_graph,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

std::vector<at::Tensor> ReplicaPass::backward(const std::vector<at::Tensor>& gradients,
                                              bool keep_graph) {
  TORCH_CHECK(!released_,
              error_text(kDataParallelArea,
                         "got a second backward through one forward, whose graphs are freed, "
                         "expected the first",
                         {}, "Call backward(retain_graph=True) the first time."));
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums =
      replicas_->backward(*this, [&](const std::vector<size_t>& positions) {
        run_backward(gradients, positions, keep_graph);
      });
  std::vector<at::Tensor> results;
  for (const Input& input : inputs_) results.push_back(input_gradient(input));
  results.insert(results.end(), std::make_move_iterator(sums.begin()),
                 std::make_move_iterator(sums.end()));
  return results;
}

at::Tensor ReplicaPass::input_gradient(const Input& input) const {
  std::vector<at::Tensor> parts;
  bool any = false;
  for (const at::Tensor& leaf : input.leaves) {
    at::Tensor part = std::exchange(leaf.mutable_grad(), {});
    any |= part.defined();
    parts.push_back(part.defined() ? on(input.device, part) : part);
  }
  if (!any) return {};
  for (size_t position = 0; position < parts.size(); ++position)
    if (!parts[position].defined())
      parts[position] =
          at::zeros_like(input.leaves[position], at::TensorOptions().device(input.device));
  if (!input.repeated) return at::cat(parts, input.dim);
  at::Tensor sum = parts.front();
  for (size_t position = 1; position < parts.size(); ++position) sum = sum + parts[position];
  return sum;
}

void ReplicaPass::release() {
  released_ = true;
  outputs_.clear();
  inputs_.clear();
}

}  // namespace trireme
