#include <trireme/comm/threads/thread_group.h>

#include <trireme/comm/threads/thread_state.h>
#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace trireme {
namespace {

using State = ThreadGroup::State;
using Tensors = std::vector<at::Tensor>;

void reduce_into(at::Tensor& sum, const at::Tensor& other, ReduceOp op) {
  if (op == ReduceOp::kSum) {
    sum.add_(other);
  } else {
    sum = op == ReduceOp::kMax ? at::maximum(sum, other) : at::minimum(sum, other);
  }
}

// Reduces the i-th tensors of all ranks, in the order of ranks, into memory of its own.
at::Tensor reduced(const std::vector<State::Deposit>& all, size_t i, ReduceOp op) {
  at::Tensor sum = all.front().inputs[i].clone();
  for (size_t rank = 1; rank < all.size(); ++rank) reduce_into(sum, all[rank].inputs[i], op);
  return sum;
}

class ThreadSender final : public TensorSender {
 public:
  ThreadSender(std::shared_ptr<State> state, ThreadQueue& queue)
      : state_(std::move(state)),
        queue_(queue),
        from_(state_->device(queue.request.from)),
        to_(state_->device(queue.request.to)) {}

  void send(const TensorMessage& message, const std::string& /*label*/) override {
    TensorMessage sent{message.step, message.micro_batch, message.text};
    for (const at::Tensor& tensor : message.tensors) {
      sent.requires_grad.push_back(tensor.defined() && tensor.requires_grad());
      sent.tensors.push_back(tensor.defined() ? there(tensor.detach()) : at::Tensor());
    }
    state_->push(queue_, std::move(sent));
  }

 private:
  at::Tensor there(at::Tensor tensor) const {
    if (from_ == to_ || tensor.device() != from_) return tensor;
    return tensor.to(tensor.options().device(to_), /*non_blocking=*/!to_.is_cpu());
  }

  std::shared_ptr<State> state_;
  ThreadQueue& queue_;
  c10::Device from_;
  c10::Device to_;
};

class ThreadReceiver final : public TensorReceiver {
 public:
  ThreadReceiver(std::shared_ptr<State> state, ThreadQueue& queue)
      : state_(std::move(state)), queue_(queue) {}

  TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) override {
    TensorMessage got = state_->take_message(queue_, label);
    if (got.step != step || got.micro_batch != micro_batch) {
      C10_THROW_ERROR(
          DistBackendError,
          error_text("threads",
                     c10::str("got micro-batch ", got.micro_batch, " of step ", got.step, " from ",
                              queue_.request.name, ", expected ", micro_batch, " of step ", step),
                     {queue_.request.to, state_->ranks()}, "Run the same table on all threads."));
    }
    return got;
  }
  void done_with_one() override {}  // a reference delays no thread
  void forget_before(int64_t step) { state_->forget_before(queue_, step); }

 private:
  std::shared_ptr<State> state_;
  ThreadQueue& queue_;
};

class ThreadChannels final : public TensorChannels {
 public:
  ThreadChannels(const std::shared_ptr<State>& state, int64_t rank,
                 const std::vector<ChannelRequest>& requests)
      : queues_(state->queues(rank, requests)) {
    for (const auto& queue : *queues_) {
      const ChannelRequest& request = queue->request;
      senders_.push_back(request.from == rank ? std::make_unique<ThreadSender>(state, *queue)
                                              : nullptr);
      receivers_.push_back(request.to == rank ? std::make_unique<ThreadReceiver>(state, *queue)
                                              : nullptr);
    }
  }

  TensorSender* sender(size_t index) override { return senders_.at(index).get(); }
  TensorReceiver* receiver(size_t index) override { return receivers_.at(index).get(); }
  void forget_before(int64_t step) override {
    for (const auto& receiver : receivers_)
      if (receiver) receiver->forget_before(step);
  }

 private:
  std::shared_ptr<State::Queues> queues_;
  std::vector<std::unique_ptr<ThreadSender>> senders_;
  std::vector<std::unique_ptr<ThreadReceiver>> receivers_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<State> state, int64_t rank)
      : state_(std::move(state)), rank_(rank) {}

  RankOf rank_of() const override { return {rank_, state_->ranks()}; }

  Pending all_reduce(Tensors tensors, ReduceOp op, std::string label) override {
    meet("all_reduce", label, tensors, tensors, [op](std::vector<State::Deposit>& all) {
      for (size_t i = 0; i < all.front().inputs.size(); ++i) {
        const at::Tensor sum = reduced(all, i, op);
        for (State::Deposit& deposit : all) deposit.outputs[i].copy_(sum);
      }
    });
    return {};
  }

  Pending broadcast(Tensors tensors, int64_t root, std::string label) override {
    meet("broadcast", label, tensors, tensors, [root](std::vector<State::Deposit>& all) {
      const State::Deposit& first = all.at(static_cast<size_t>(root));
      for (State::Deposit& deposit : all) {
        for (size_t i = 0; i < deposit.outputs.size(); ++i)
          if (&deposit != &first) deposit.outputs[i].copy_(first.inputs[i]);
      }
    });
    return {};
  }

  Pending all_gather(Tensors outputs, Tensors inputs, std::string label) override {
    meet("all_gather", label, outputs, inputs, [](std::vector<State::Deposit>& all) {
      const auto world = static_cast<int64_t>(all.size());
      for (size_t i = 0; i < all.front().inputs.size(); ++i) {
        Tensors parts;
        for (const State::Deposit& deposit : all) parts.push_back(deposit.inputs[i].reshape({-1}));
        const at::Tensor whole = at::stack(parts);
        for (State::Deposit& deposit : all) deposit.outputs[i].view({world, -1}).copy_(whole);
      }
    });
    return {};
  }

  Pending reduce_scatter(Tensors outputs, Tensors inputs, ReduceOp op, std::string label) override {
    meet("reduce_scatter", label, outputs, inputs, [op](std::vector<State::Deposit>& all) {
      const auto world = static_cast<int64_t>(all.size());
      for (size_t i = 0; i < all.front().inputs.size(); ++i) {
        const at::Tensor sum = reduced(all, i, op).view({world, -1});
        for (int64_t rank = 0; rank < world; ++rank) {
          at::Tensor& output = all[static_cast<size_t>(rank)].outputs[i];
          output.copy_(sum[rank].view_as(output));
        }
      }
    });
    return {};
  }

  Pending barrier(std::string label) override {
    meet("barrier", label, {}, {}, [](std::vector<State::Deposit>& /*all*/) {});
    return {};
  }

  void announce_failure(const std::string& reason) noexcept override {
    try {
      state_->announce_failure(rank_, reason);
    } catch (...) {  // without memory for a text there is no better one
      state_->announce_failure(rank_, {});
    }
  }
  // See ThreadGroup::recover().
  std::optional<std::string> failure() const override { return std::nullopt; }

  std::unique_ptr<TensorChannels> own_channels(
      const std::vector<ChannelRequest>& requests) override {
    return std::make_unique<ThreadChannels>(state_, rank_, requests);
  }

 private:
  void meet(const char* verb, const std::string& label, Tensors outputs, Tensors inputs,
            const State::Run& run) {
    for (const at::Tensor& tensor : inputs) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          tensor.layout() == at::kStrided && tensor.device().is_cpu(),
          error_text("threads",
                     std::string("got a tensor that is not dense, or not on the CPU, for ") + verb +
                         " (" + label + ")",
                     rank_of(), "Use ranks that are processes."));
    }
    const at::NoGradGuard no_grad;
    state_->meet(rank_,
                 {std::string(verb) + " (" + label + ")", std::move(outputs), std::move(inputs)},
                 run);
  }

  std::shared_ptr<State> state_;
  int64_t rank_;
};

}  // namespace

ThreadGroup::ThreadGroup(int64_t ranks, std::vector<c10::Device> devices) {
  TORCH_CHECK_VALUE(ranks >= 1, error_text("threads",
                                           "got a group of " + std::to_string(ranks) +
                                               " threads, expected 1 or more",
                                           {}, "Ask for one thread at least."));
  state_ = std::make_shared<State>(ranks, std::move(devices));
}

ThreadGroup::~ThreadGroup() = default;

void ThreadGroup::recover() { state_->recover(); }

std::shared_ptr<Communicator> ThreadGroup::communicator(int64_t rank) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < state_->ranks(),
                    error_text("threads",
                               "got rank " + std::to_string(rank) + " of " +
                                   std::to_string(state_->ranks()) + " threads",
                               {}, "Count ranks from 0 on."));
  return std::make_shared<ThreadCommunicator>(state_, rank);
}

}  // namespace trireme
