#include <recording_communicator.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme::test {
namespace {

using Tensors = std::vector<at::Tensor>;

// A group in which every peer holds the same tensors as this rank.
class EqualRanks final : public Communicator {
 public:
  explicit EqualRanks(RankOf where) : where_(where) {}

  RankOf rank_of() const override { return where_; }
  Pending all_reduce(Tensors tensors, ReduceOp op, std::string /*label*/) override {
    if (op == ReduceOp::kSum) {
      for (at::Tensor& tensor : tensors) tensor.mul_(where_.world);
    }
    return {};
  }
  Pending broadcast(Tensors, int64_t /*root*/, std::string /*label*/) override { return {}; }
  Pending all_gather(Tensors outputs, Tensors inputs, std::string /*label*/) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      // A copy, since the input may be a part of the output.
      outputs[i].view({where_.world, -1}).copy_(inputs[i].view({1, -1}).clone());
    }
    return {};
  }
  Pending reduce_scatter(Tensors outputs, Tensors inputs, ReduceOp op,
                         std::string /*label*/) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      outputs[i].view({-1}).copy_(inputs[i].view({where_.world, -1})[where_.rank]);
      if (op == ReduceOp::kSum) outputs[i].mul_(where_.world);
    }
    return {};
  }
  Pending send(Tensors, int64_t /*to*/, std::string /*label*/) override { return {}; }
  Pending recv(Tensors, int64_t /*from*/, std::string /*label*/) override { return {}; }
  Pending barrier(std::string /*label*/) override { return {}; }
  void announce_failure(const std::string& reason) noexcept override { failure_ = reason; }
  std::optional<std::string> failure() const override { return failure_; }

 private:
  RankOf where_;
  std::optional<std::string> failure_;
};

}  // namespace

RecordingCommunicator::RecordingCommunicator(std::shared_ptr<Communicator> inner)
    : ForwardingCommunicator(std::move(inner)) {}

RecordingCommunicator::RecordingCommunicator(RankOf where)
    : ForwardingCommunicator(std::make_shared<EqualRanks>(where)) {}

void RecordingCommunicator::note(const char* verb, const std::string& label,
                                 const Tensors& tensors) {
  WireRecord record{verb, label, 0, {}};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() == at::kStrided) record.bytes += static_cast<int64_t>(tensor.nbytes());
    record.dtypes.emplace_back(c10::toString(tensor.scalar_type()));
  }
  records_.push_back(std::move(record));
}

Pending RecordingCommunicator::all_reduce(Tensors tensors, ReduceOp op, std::string label) {
  note("all_reduce", label, tensors);
  return ForwardingCommunicator::all_reduce(std::move(tensors), op, std::move(label));
}

Pending RecordingCommunicator::broadcast(Tensors tensors, int64_t root, std::string label) {
  note("broadcast", label, tensors);
  return ForwardingCommunicator::broadcast(std::move(tensors), root, std::move(label));
}

Pending RecordingCommunicator::all_gather(Tensors outputs, Tensors inputs, std::string label) {
  note("all_gather", label, inputs);
  return ForwardingCommunicator::all_gather(std::move(outputs), std::move(inputs),
                                            std::move(label));
}

Pending RecordingCommunicator::reduce_scatter(Tensors outputs, Tensors inputs, ReduceOp op,
                                              std::string label) {
  note("reduce_scatter", label, inputs);
  return ForwardingCommunicator::reduce_scatter(std::move(outputs), std::move(inputs), op,
                                                std::move(label));
}

Pending RecordingCommunicator::send(Tensors tensors, int64_t to, std::string label) {
  note("send", message_text("send", to, label, rank_of()), tensors);
  return ForwardingCommunicator::send(std::move(tensors), to, std::move(label));
}

Pending RecordingCommunicator::recv(Tensors tensors, int64_t from, std::string label) {
  note("recv", message_text("recv", from, label, rank_of()), tensors);
  return ForwardingCommunicator::recv(std::move(tensors), from, std::move(label));
}

Pending RecordingCommunicator::barrier(std::string label) {
  note("barrier", label, {});
  return ForwardingCommunicator::barrier(std::move(label));
}

}  // namespace trireme::test
