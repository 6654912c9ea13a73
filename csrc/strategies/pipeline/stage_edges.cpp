#include <trireme/strategies/pipeline/stage_edges.h>

#include <trireme/comm/make_channels.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/scoped_timer.h>

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

void expect_skip(const PipelineSchedule& schedule, const PipelineSkip& skip, bool is_new) {
  const std::string what =
      c10::str("got the skip '", skip.name, "' from stage ", skip.from, " to stage ", skip.to);
  if (!is_new)
    refuse_pipeline(what + ", and another one of that name", "Give each a name of its own.");
  if (skip.from < 0 || skip.to < skip.from || skip.to >= schedule.stages) {
    refuse_pipeline(what + c10::str(", expected it from one of ", schedule.stages,
                                    " stages to the same or a later one"),
                    "Pop behind the stash.");
  }
  if (orders_of(schedule, skip.from) != orders_of(schedule, skip.to)) {
    refuse_pipeline(what + ", and a table in which these run micro-batches in different orders",
                    "Let them run micro-batches in one order.");
  }
}

StageEdge make_edge(const PipelineSchedule& schedule, PipelineEdge stages) {
  const bool is_local = schedule.stage_rank[static_cast<size_t>(stages.from)] ==
                        schedule.stage_rank[static_cast<size_t>(stages.to)];
  return {stages, is_local, schedule.micro_batches};
}

// Takes the next `count` of some tensors.
Tensors take(Tensors& tensors, size_t& next, size_t count) {
  const auto begin = tensors.begin() + static_cast<std::ptrdiff_t>(next);
  next += count;
  return {std::make_move_iterator(begin),
          std::make_move_iterator(begin + static_cast<std::ptrdiff_t>(count))};
}

void append(Tensors& tensors, Tensors more) {
  std::move(more.begin(), more.end(), std::back_inserter(tensors));
}

}  // namespace

StageEdges::StageEdges(const PipelineSchedule& schedule, const std::vector<PipelineSkip>& skips,
                       Communicator& communicator)
    : ends_(static_cast<size_t>(schedule.stages)) {
  for (int64_t stage = 0; stage + 1 < schedule.stages; ++stage)
    edges_.push_back(make_edge(schedule, {stage, stage + 1}));
  std::set<std::string> names;
  for (const PipelineSkip& skip : skips) {
    expect_skip(schedule, skip, names.insert(skip.name).second);
    add_skip(schedule, skip);
  }
  std::stable_sort(edges_.begin() + schedule.stages - 1, edges_.end(),
                   [](const StageEdge& a, const StageEdge& b) { return a.to() > b.to(); });
  open_channels(schedule, communicator);
  for (StageEdge& edge : edges_) {
    Ends& from = ends_[static_cast<size_t>(edge.from())];
    Ends& to = ends_[static_cast<size_t>(edge.to())];
    if (edge.is_skip()) {
      from.stashed.push_back(&edge);
      to.popped.push_back(&edge);
    } else {
      from.next = to.before = &edge;
    }
  }
}

void StageEdges::add_skip(const PipelineSchedule& schedule, const PipelineSkip& skip) {
  if (skip.from == skip.to) {
    inner_.push_back(skip);
    return;
  }
  auto edge = std::find_if(edges_.begin(), edges_.end(), [&](const StageEdge& known) {
    return known.is_skip() && known.from() == skip.from && known.to() == skip.to;
  });
  if (edge == edges_.end())
    edge = edges_.insert(edges_.end(), make_edge(schedule, {skip.from, skip.to}));
  edge->add_skip(skip.name);
}

void StageEdges::open_channels(const PipelineSchedule& schedule, Communicator& communicator) {
  std::vector<ChannelRequest> requests;
  std::vector<std::pair<StageEdge*, bool>> ways;  // an edge, and whether onward
  const auto request = [&](StageEdge& edge, bool is_onward, int64_t slots, std::string name) {
    const int64_t from = schedule.stage_rank[static_cast<size_t>(edge.from())];
    const int64_t to = schedule.stage_rank[static_cast<size_t>(edge.to())];
    requests.push_back({is_onward ? from : to, is_onward ? to : from, slots, std::move(name)});
    ways.emplace_back(&edge, is_onward);
  };
  for (const auto& [edge, slots] : check_schedule(schedule)) {
    StageEdge& outputs = edges_[static_cast<size_t>(std::min(edge.from, edge.to))];
    request(outputs, edge.from < edge.to, slots,
            c10::str("stage ", edge.from, " to stage ", edge.to));
  }
  for (StageEdge& edge : edges_) {
    if (!edge.is_skip() || edge.is_local()) continue;
    const std::string name = c10::str("skips of stage ", edge.from(), " to stage ", edge.to());
    request(edge, /*is_onward=*/true, schedule.micro_batches, name);
    request(edge, /*is_onward=*/false, schedule.micro_batches, "gradients of " + name);
  }
  channels_ = make_channels(communicator, std::move(requests));
  for (size_t i = 0; i < ways.size(); ++i)
    ways[i].first->connect(ways[i].second, channels_->sender(i), channels_->receiver(i));
}

StageSkips StageEdges::skips_of(int64_t stage) const {
  StageSkips skips;
  for (const StageEdge& edge : edges_) {
    for (const std::string& name : edge.names()) {
      if (edge.from() == stage) skips.outgoing.push_back({.name = name});
      if (edge.to() == stage) skips.incoming.push_back({.name = name});
    }
  }
  for (const PipelineSkip& skip : inner_)
    if (skip.from == stage) skips.inner.push_back({.name = skip.name});
  return skips;
}

void StageEdges::send_onward(const EdgeMessage& message, PipelineValue outputs) {
  const Ends& own = ends(message.stage);
  Tensors stashed = message.stage.take_stashed();
  size_t next = 0;
  for (StageEdge* edge : own.stashed) {
    const ScopedTimer waits(message.stage.waits().skips);
    edge->send_onward(message, {take(stashed, next, edge->names().size())});
  }
  if (own.next == nullptr) return;
  const ScopedTimer waits(message.stage.waits().to_next);
  own.next->send_onward(message, std::move(outputs));
}

StageInput StageEdges::receive_onward(const EdgeMessage& message) {
  const Ends& own = ends(message.stage);
  StageInput input;
  if (own.before != nullptr) {
    const ScopedTimer waits(message.stage.waits().from_before);
    input = own.before->receive_onward(message);
  }
  for (StageEdge* edge : own.popped) {
    const ScopedTimer waits(message.stage.waits().skips);
    StageInput got = edge->receive_onward(message);
    append(input.value.tensors, std::move(got.value.tensors));
    input.needs_gradient.insert(input.needs_gradient.end(), got.needs_gradient.begin(),
                                got.needs_gradient.end());
  }
  return input;
}

void StageEdges::send_back(const EdgeMessage& message, Tensors gradients) {
  const Ends& own = ends(message.stage);
  const size_t inputs = gradients.size() - std::min(gradients.size(), message.stage.popped());
  size_t next = inputs;
  for (StageEdge* edge : own.popped) {  // those of skips go first: they never wait
    const ScopedTimer waits(message.stage.waits().skips);
    if (edge->is_due(message.micro_batch))
      edge->send_back(message, take(gradients, next, edge->names().size()));
    else
      next += edge->names().size();
  }
  if (own.before == nullptr || !own.before->is_due(message.micro_batch)) return;
  gradients.resize(inputs);
  const ScopedTimer waits(message.stage.waits().to_before);
  own.before->send_back(message, std::move(gradients));
}

Tensors StageEdges::receive_back(const EdgeMessage& message) {
  const Ends& own = ends(message.stage);
  Tensors gradients;
  for (StageEdge* edge : own.stashed) {
    const ScopedTimer waits(message.stage.waits().skips);
    append(gradients, edge->is_due(message.micro_batch) ? edge->receive_back(message)
                                                        : Tensors(edge->names().size()));
  }
  if (own.next == nullptr || !own.next->is_due(message.micro_batch)) return gradients;
  const ScopedTimer waits(message.stage.waits().from_next);
  append(gradients, own.next->receive_back(message));
  return gradients;
}

void StageEdges::done_with_input(const Stage& stage) {
  const Ends& own = ends(stage);
  if (own.before != nullptr) own.before->done_with_input();
  for (StageEdge* edge : own.popped) edge->done_with_input();
}

void StageEdges::done_with_gradients(const EdgeMessage& message) {
  const Ends& own = ends(message.stage);
  if (own.next != nullptr) own.next->done_with_gradients(message.micro_batch);
  for (StageEdge* edge : own.stashed) edge->done_with_gradients(message.micro_batch);
}

std::vector<std::vector<bool>> StageEdges::due() const {
  std::vector<std::vector<bool>> all;
  for (const StageEdge& edge : edges_) all.push_back(edge.due());
  return all;
}

void StageEdges::set_due(const std::vector<std::vector<bool>>& due) {
  for (size_t i = 0; i < edges_.size(); ++i) edges_[i].set_due(due[i]);
}

void StageEdges::abandon() {
  for (StageEdge& edge : edges_) edge.abandon();
}

}  // namespace trireme
