#include <trireme/comm/c10d/custom_communicator.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

// The user's collective on its way, and the copies that follow it.
class CustomCommunicator::Flat final : public Pending::State {
 public:
  Flat(std::shared_ptr<c10d::Work> work, std::shared_ptr<GroupHealth> health, std::string operation,
       bool on_cpu, std::function<void()> copy_out)
      : work_(std::move(work)),
        health_(std::move(health)),
        operation_(std::move(operation)),
        on_cpu_(on_cpu),
        copy_out_(std::move(copy_out)) {}

  bool done() const override { return !work_ || work_->isCompleted(); }
  void wait() override {
    if (!copy_out_) return;
    if (work_) wait_for_work(*work_, on_cpu_, {operation_}, *health_);
    const at::NoGradGuard no_grad;
    std::exchange(copy_out_, nullptr)();
  }

 private:
  std::shared_ptr<c10d::Work> work_;
  std::shared_ptr<GroupHealth> health_;
  std::string operation_;
  bool on_cpu_;
  std::function<void()> copy_out_;
};

CustomCommunicator::CustomCommunicator(std::shared_ptr<Communicator> inner)
    : ForwardingCommunicator(std::move(inner)), health_(health_of(*this->inner())) {}

std::string CustomCommunicator::begin(const char* verb, const std::string& label) {
  std::string operation = std::string("custom ") + verb + " of " + label;
  health_->check_usable(operation);
  health_->board.note_started(operation);
  return operation;
}

at::Tensor CustomCommunicator::allocate(const CustomCollective& collective, int64_t numel,
                                        const at::Tensor& like, at::ScalarType dtype) const {
  at::Tensor made = collective.allocate(numel, dtype, like.device());
  TORCH_CHECK_VALUE(
      made.numel() == numel && made.scalar_type() == dtype && made.device() == like.device() &&
          made.is_contiguous(),
      error_text("comm",
                 "got " + std::to_string(made.numel()) + " elements of " +
                     c10::toString(made.scalar_type()) + " on " + made.device().str() +
                     " from allocate() of a custom collective, expected " + std::to_string(numel) +
                     " of " + c10::toString(dtype) + " on " + like.device().str() + ", contiguous",
                 rank_of(), "Return torch.empty(*size, dtype=dtype, device=device), or the like."));
  return made.view({-1});
}

Pending CustomCommunicator::all_gather(std::vector<at::Tensor> outputs,
                                       std::vector<at::Tensor> inputs, std::string label) {
  if (!all_gather_ || inputs.empty())
    return ForwardingCommunicator::all_gather(std::move(outputs), std::move(inputs),
                                              std::move(label));
  std::string operation = begin("all_gather", label);
  const at::NoGradGuard no_grad;
  at::ScalarType dtype = inputs.front().scalar_type();
  for (const at::Tensor& input : inputs)
    if (input.scalar_type() != dtype) dtype = at::kByte;
  int64_t numel = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i] = inputs[i].view({-1}).view(dtype);
    outputs[i] = outputs[i].view({-1}).view(dtype).view({world(), -1});
    numel += inputs[i].numel();
  }
  const at::Tensor flat = allocate(all_gather_, world() * numel, inputs.front(), dtype);
  const at::Tensor own = flat.narrow(0, rank() * numel, numel);
  int64_t begin = 0;
  for (const at::Tensor& input : inputs) {
    own.narrow(0, begin, input.numel()).copy_(input);
    begin += input.numel();
  }
  std::shared_ptr<c10d::Work> work = all_gather_.start(flat, own);
  const bool on_cpu = flat.is_cpu();
  return Pending(
      std::make_unique<Flat>(std::move(work), health_, std::move(operation), on_cpu,
                             [flat = flat.view({world(), numel}), outputs = std::move(outputs)] {
                               int64_t offset = 0;
                               for (const at::Tensor& output : outputs) {
                                 output.copy_(flat.narrow(1, offset, output.size(1)));
                                 offset += output.size(1);
                               }
                             }));
}

void CustomCommunicator::set_reduce_scatter(CustomCollective collective) {
  reduce_scatter_ = std::move(collective);
  scatter_waits_ = true;
}

Pending CustomCommunicator::reduce_scatter(std::vector<at::Tensor> outputs,
                                           std::vector<at::Tensor> inputs, ReduceOp op,
                                           std::string label) {
  if (!reduce_scatter_ || inputs.size() != 1 || op != ReduceOp::kSum)
    return ForwardingCommunicator::reduce_scatter(std::move(outputs), std::move(inputs), op,
                                                  std::move(label));
  std::string operation = begin("reduce_scatter", label);
  const at::NoGradGuard no_grad;
  const at::Tensor& input = inputs.front();
  const at::Tensor output = outputs.front().view({-1});
  const at::Tensor sent = allocate(reduce_scatter_, input.numel(), input, input.scalar_type());
  sent.copy_(input.view({-1}));
  const at::Tensor sums = allocate(reduce_scatter_, output.numel(), output, output.scalar_type());
  std::shared_ptr<c10d::Work> work = reduce_scatter_.start(sums, sent);
  scatter_waits_ = work == nullptr && sums.is_cpu();
  return Pending(std::make_unique<Flat>(std::move(work), health_, std::move(operation),
                                        sums.is_cpu(),
                                        [sums, sent, output] { output.copy_(sums); }));
}

std::shared_ptr<Communicator> plain_of(std::shared_ptr<Communicator> communicator) {
  if (const auto custom = std::dynamic_pointer_cast<CustomCommunicator>(communicator))
    return custom->inner();
  return communicator;
}

}  // namespace trireme
