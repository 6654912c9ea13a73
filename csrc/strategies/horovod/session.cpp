#include <trireme/strategies/horovod/session.h>

#include <trireme/common/exception_text.h>
#include <trireme/strategies/horovod/adasum.h>
#include <trireme/strategies/horovod/pass_counts.h>

#include <ATen/ATen.h>

#include <cstdio>
#include <numeric>

namespace trireme::horovod {
namespace {

const char* name_of(Op op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Adasum", "Min", "Max"};
  return kNames[static_cast<size_t>(op)];
}

ReduceOp sum_or_extreme(Op op) {
  if (op == Op::kMin) return ReduceOp::kMin;
  return op == Op::kMax ? ReduceOp::kMax : ReduceOp::kSum;
}

at::Tensor scaled(const at::Tensor& values, double factor) {
  if (factor == 1) return values;
  if (values.is_floating_point() || values.is_complex()) return values.mul(factor);
  return values.to(at::kDouble).mul(factor).to(values.scalar_type());  // truncates
}

at::Tensor reduced(const at::Tensor& tensor, const AllreduceOptions& options, Communicator& ranks) {
  const at::NoGradGuard no_grad;
  const bool is_half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  at::Tensor values = tensor.detach().to(is_half ? at::kFloat : tensor.scalar_type());
  values = scaled(values, options.prescale_factor).clone(at::MemoryFormat::Contiguous);
  if (options.op == Op::kAdasum) {
    adasum_over_ranks({values}, ranks, options.name);
  } else {
    ranks.all_reduce({values}, sum_or_extreme(options.op), options.name).wait();
  }
  const double world = options.op == Op::kAverage ? static_cast<double>(ranks.world()) : 1;
  return scaled(values, options.postscale_factor / world).to(tensor.scalar_type());
}

std::string text_of(const at::Tensor& tensor) {
  return c10::str(c10::toString(tensor.scalar_type()), " ", tensor.sizes());
}

std::shared_ptr<Communicator> split_off(Communicator& ranks, const std::string& name) {
  std::vector<int> all(static_cast<size_t>(ranks.world()));
  std::iota(all.begin(), all.end(), 0);
  auto part = ranks.split(all, name);
  TORCH_CHECK_NOT_IMPLEMENTED(
      part != nullptr, error_text(kArea, "got a group of which no other groups can be made",
                                  ranks.rank_of(), "Use the backend trireme, gloo or nccl."));
  return part;
}

}  // namespace

NamedTensors::NamedTensors(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
}

Session::Session(std::shared_ptr<Communicator> ranks)
    : where_(ranks->rank_of()),
      ranks_(std::move(ranks)),
      operations_(split_off(*ranks_, "horovod/operations")),
      gradients_(split_off(*ranks_, "horovod/gradients")),
      order_(
          std::make_unique<NamedOrder>(split_off(*ranks_, "horovod/order"), NamedOrderOptions{})) {
  thread_ = std::thread([this] { run(); });
}

Session::~Session() {
  order_->close();
  thread_.join();
}

void Session::run() {
  std::string why = "this rank has shut down";
  try {
    while (order_->wait_for_next()) {
      if (const auto report = order_->take_report())
        std::fprintf(stderr, "[horovod] some ranks wait: %s\n", report->c_str());
      if (const auto agreed = order_->next()) perform(*agreed);
    }
  } catch (const std::exception& error) {
    why = what_of(error);
  }
  const std::lock_guard lock(mutex_);
  failure_ = why;
  for (const auto& [name, operation] : pending_)
    operation->done.set_exception(error_of(operation->kind, name, why));
  pending_.clear();
}

void Session::perform(const AgreedOperation& agreed) {
  const NamedOperation& named = agreed.operation;
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(named.name);
    if (found == pending_.end()) return;
    operation = found->second;
    pending_.erase(found);
  }
  try {
    if (!agreed.error.empty())
      std::rethrow_exception(error_of(named.kind, named.name, agreed.error));
    operation->work();
    operation->done.set_value();
  } catch (...) {
    operation->done.set_exception(std::current_exception());
  }
}

std::exception_ptr Session::error_of(const std::string& kind, const std::string& name,
                                     const std::string& what) const {
  const std::string text = error_text(kArea, kind + " '" + name + "': " + what, where_,
                                      "Issue the same operation on all ranks of the set.");
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

std::string Session::name_for(const std::string& kind) {
  const std::lock_guard lock(mutex_);
  return kind + ".noname." + std::to_string(unnamed_[kind]++);
}

void Session::issue(NamedOperation named, std::function<void()> work) {
  const auto operation = std::make_shared<Operation>(Operation{named.kind, std::move(work)});
  std::future<void> done = operation->done.get_future();
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) std::rethrow_exception(error_of(named.kind, named.name, failure_));
    TORCH_CHECK_VALUE(pending_.emplace(named.name, operation).second,
                      error_text(kArea,
                                 "got a second operation of the name '" + named.name +
                                     "', expected one in flight",
                                 where_, "Wait for the first one, or give another name."));
  }
  try {
    order_->announce(named);
  } catch (const c10::DistBackendError& error) {
    const std::lock_guard lock(mutex_);
    pending_.erase(named.name);
    std::rethrow_exception(error_of(named.kind, named.name, what_of(error)));
  }
  done.get();
}

at::Tensor Session::allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided,
      error_text(kArea, "got a sparse tensor, expected a dense one", where_, "Call to_dense()."));
  if (options.op == Op::kAdasum) check_adasum_ranks(where_.world);
  AllreduceOptions named = options;
  if (named.name.empty()) named.name = name_for("allreduce");
  NamedOperation operation;
  operation.name = named.name;
  operation.kind = "allreduce";
  operation.terms = {{"dtype", c10::toString(tensor.scalar_type())},
                     {"shape", c10::str(tensor.sizes())},
                     {"op", name_of(named.op)},
                     {"prescale_factor", std::to_string(named.prescale_factor)},
                     {"postscale_factor", std::to_string(named.postscale_factor)}};
  at::Tensor result;
  issue(std::move(operation), [&] { result = reduced(tensor, named, *operations_); });
  return result;
}

void Session::broadcast_parameters(const NamedTensors& parameters, int64_t root) {
  TORCH_CHECK_VALUE(root >= 0 && root < where_.world,
                    error_text(kArea,
                               "got root rank " + std::to_string(root) + ", expected one of 0 to " +
                                   std::to_string(where_.world - 1),
                               where_, "Pass the number of a rank."));
  NamedOperation operation;
  operation.kind = "broadcast parameters";
  operation.name = name_for(operation.kind);
  operation.terms = {{"root rank", std::to_string(root)},
                     {"number of tensors", std::to_string(parameters.all.size())}};
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters.all) {
    operation.terms.emplace_back("'" + name + "'", text_of(tensor));
    tensors.push_back(tensor.detach());
  }
  issue(std::move(operation), [&] {
    const at::NoGradGuard no_grad;
    operations_->broadcast(tensors, root, "parameters").wait();
  });
}

// --- this process --------------------------------------------------------------------------------

namespace {

struct Run {
  std::optional<Context> context;
  std::unique_ptr<Session> session;
};

std::optional<Run>& current_run() {
  static std::optional<Run> run;
  return run;
}

std::shared_ptr<Communicator> group_there_is() {
  try {
    return current_communicator();
  } catch (const c10::ValueError&) {
    return nullptr;
  }
}

}  // namespace

void init(const InitOptions& options) {
  if (current_run()) return;
  Run run;
  std::shared_ptr<Communicator> ranks = group_there_is();
  if (!ranks) ranks = run.context.emplace(trireme::init(options)).communicator();
  run.session = std::make_unique<Session>(std::move(ranks));
  current_run() = std::move(run);
}

void shutdown() {
  if (!current_run()) return;
  current_run()->session.reset();
  if (current_run()->context) current_run()->context->shutdown();
  current_run().reset();
}

bool is_initialized() { return current_run().has_value(); }

Session& session() {
  TORCH_CHECK_VALUE(current_run(),
                    error_text(kArea, "got a call before hvd::init() or after hvd::shutdown()", {},
                               "Call hvd::init() first."));
  return *current_run()->session;
}

int64_t rank() { return session().where().rank; }
int64_t size() { return session().where().world; }

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  return session().allreduce(tensor, options);
}

void broadcast_parameters(const NamedTensors& parameters, int64_t root) {
  session().broadcast_parameters(parameters, root);
}

}  // namespace trireme::horovod
