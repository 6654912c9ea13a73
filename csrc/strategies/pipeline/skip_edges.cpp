#include <trireme/strategies/pipeline/skip_edges.h>

#include <trireme/comm/make_channels.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<at::Tensor>;

// Returns the micro-batches of a stage in the order of its forwards, and of its backwards.
std::pair<std::vector<int64_t>, std::vector<int64_t>> orders_of(const PipelineSchedule& schedule,
                                                                int64_t stage) {
  std::pair<std::vector<int64_t>, std::vector<int64_t>> orders;
  const int64_t rank = schedule.stage_rank[static_cast<size_t>(stage)];
  for (const PipelineAction& action : schedule.rows[static_cast<size_t>(rank)]) {
    for_each_part(action, [&](const PipelineAction& part) {
      if (part.stage != stage || !is_compute(part.kind)) return;
      if (part.kind == ActionKind::kForward) orders.first.push_back(part.micro_batch);
      if (part.kind == ActionKind::kBackward || part.kind == ActionKind::kBackwardInput)
        orders.second.push_back(part.micro_batch);
    });
  }
  return orders;
}

// Takes the next `count` of some tensors.
Tensors take(Tensors& tensors, size_t& next, size_t count) {
  const auto begin = tensors.begin() + static_cast<std::ptrdiff_t>(next);
  next += count;
  return {std::make_move_iterator(begin),
          std::make_move_iterator(begin + static_cast<std::ptrdiff_t>(count))};
}

bool any(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

}  // namespace

SkipEdges::SkipEdges(const PipelineSchedule& schedule, const std::vector<PipelineSkip>& skips,
                     Communicator& communicator) {
  std::set<std::string> names;
  for (const PipelineSkip& skip : skips) {
    const std::string what =
        c10::str("got the skip '", skip.name, "' from stage ", skip.from, " to stage ", skip.to);
    if (!names.insert(skip.name).second)
      refuse_pipeline(what + ", and another one of that name", "Give each a name of its own.");
    if (skip.from < 0 || skip.to < skip.from || skip.to >= schedule.stages) {
      refuse_pipeline(what + c10::str(", expected it from one of ", schedule.stages,
                                      " stages to the same or a later one"),
                      "Pop behind the stash.");
    }
    if (skip.from == skip.to) {
      inner_.push_back(skip);
      continue;
    }
    if (orders_of(schedule, skip.from) != orders_of(schedule, skip.to)) {
      refuse_pipeline(what + ", and a table in which these run micro-batches in different orders",
                      "Let them run micro-batches in one order.");
    }
    auto edge = std::find_if(edges_.begin(), edges_.end(), [&](const Edge& known) {
      return known.from == skip.from && known.to == skip.to;
    });
    if (edge == edges_.end())
      edge = edges_.insert(edges_.end(), Edge{.from = skip.from, .to = skip.to});
    edge->names.insert(edge->names.begin(), skip.name);
  }
  std::stable_sort(edges_.begin(), edges_.end(),
                   [](const Edge& a, const Edge& b) { return a.to > b.to; });
  const auto count = static_cast<size_t>(schedule.micro_batches);
  std::vector<ChannelRequest> requests;
  for (Edge& edge : edges_) {
    edge.is_due.resize(count);
    edge.inputs.resize(count);
    edge.gradients.resize(count);
    const int64_t from = schedule.stage_rank[static_cast<size_t>(edge.from)];
    const int64_t to = schedule.stage_rank[static_cast<size_t>(edge.to)];
    edge.is_local = from == to;
    if (edge.is_local) continue;
    const std::string name = c10::str("skips of stage ", edge.from, " to stage ", edge.to);
    requests.push_back({from, to, schedule.micro_batches, name});
    requests.push_back({to, from, schedule.micro_batches, "gradients of " + name});
  }
  if (requests.empty()) return;
  channels_ = make_channels(communicator, std::move(requests));
  size_t next = 0;
  for (Edge& edge : edges_) {
    if (edge.is_local) continue;
    edge.onward = channels_->sender(next);
    edge.arrives = channels_->receiver(next++);
    edge.back = channels_->sender(next);
    edge.returns = channels_->receiver(next++);
  }
}

StageSkips SkipEdges::skips_of(int64_t stage) const {
  StageSkips skips;
  for (const Edge& edge : edges_) {
    for (const std::string& name : edge.names) {
      if (edge.from == stage) skips.outgoing.push_back({.name = name});
      if (edge.to == stage) skips.incoming.push_back({.name = name});
    }
  }
  for (const PipelineSkip& skip : inner_)
    if (skip.from == stage) skips.inner.push_back({.name = skip.name});
  return skips;
}

void SkipEdges::send_onward(const Message& message, Tensors stashed, StageReport& report) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  size_t next = 0;
  for (Edge& edge : edges_) {
    if (edge.from != message.stage) continue;
    Tensors tensors = take(stashed, next, edge.names.size());
    StageInput input;
    for (const at::Tensor& tensor : tensors)
      input.needs_gradient.push_back(tensor.defined() && tensor.requires_grad());
    edge.is_due[micro_batch] = any(input.needs_gradient);
    if (edge.is_local) {
      for (const at::Tensor& tensor : tensors)
        input.value.tensors.push_back(tensor.defined() ? tensor.detach() : at::Tensor());
      edge.inputs[micro_batch] = std::move(input);
      continue;
    }
    ++report.messages;
    report.bytes += bytes_of(tensors);
    edge.onward->send({message.step, message.micro_batch, {}, std::move(tensors)}, message.label);
  }
}

void SkipEdges::receive_onward(const Message& message, StageInput& input) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  for (Edge& edge : edges_) {
    if (edge.to != message.stage) continue;
    StageInput got;
    if (edge.is_local) {
      got = std::exchange(edge.inputs[micro_batch], StageInput());
    } else {
      TensorMessage come = edge.arrives->receive(message.step, message.micro_batch, message.label);
      got = {{std::move(come.tensors)}, std::move(come.requires_grad)};
    }
    TORCH_INTERNAL_ASSERT(got.value.tensors.size() == edge.names.size());
    edge.is_due[micro_batch] = any(got.needs_gradient);
    std::move(got.value.tensors.begin(), got.value.tensors.end(),
              std::back_inserter(input.value.tensors));
    input.needs_gradient.insert(input.needs_gradient.end(), got.needs_gradient.begin(),
                                got.needs_gradient.end());
  }
}

void SkipEdges::send_back(const Message& message, Tensors gradients, StageReport& report) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  size_t next = 0;
  for (Edge& edge : edges_) {
    if (edge.to != message.stage) continue;
    Tensors own = take(gradients, next, edge.names.size());
    if (!edge.is_due[micro_batch]) continue;
    if (edge.is_local) {
      edge.gradients[micro_batch] = std::move(own);
      continue;
    }
    ++report.messages;
    report.bytes += bytes_of(own);
    edge.back->send({message.step, message.micro_batch, {}, std::move(own)}, message.label);
  }
}

Tensors SkipEdges::receive_back(const Message& message) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  Tensors gradients;
  for (Edge& edge : edges_) {
    if (edge.from != message.stage) continue;
    Tensors got(edge.names.size());
    if (edge.is_due[micro_batch]) {
      got = edge.is_local
                ? std::exchange(edge.gradients[micro_batch], Tensors())
                : edge.returns->receive(message.step, message.micro_batch, message.label).tensors;
    }
    std::move(got.begin(), got.end(), std::back_inserter(gradients));
  }
  return gradients;
}

void SkipEdges::done_with_input(int64_t stage) {
  for (Edge& edge : edges_)
    if (edge.to == stage && !edge.is_local) edge.arrives->done_with_one();
}

void SkipEdges::done_with_gradients(const Message& message) {
  for (Edge& edge : edges_) {
    if (edge.from == message.stage && !edge.is_local &&
        edge.is_due[static_cast<size_t>(message.micro_batch)])
      edge.returns->done_with_one();
  }
}

std::vector<std::vector<bool>> SkipEdges::due() const {
  std::vector<std::vector<bool>> all;
  for (const Edge& edge : edges_) all.push_back(edge.is_due);
  return all;
}

void SkipEdges::set_due(const std::vector<std::vector<bool>>& due) {
  for (size_t i = 0; i < edges_.size(); ++i) edges_[i].is_due = due[i];
}

void SkipEdges::abandon() {
  for (Edge& edge : edges_) {
    std::fill(edge.inputs.begin(), edge.inputs.end(), StageInput());
    std::fill(edge.gradients.begin(), edge.gradients.end(), Tensors());
  }
}

}  // namespace trireme
