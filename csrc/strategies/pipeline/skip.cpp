#include <trireme/strategies/pipeline/skip.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>

#include <unordered_map>
#include <utility>

namespace trireme {
namespace {

thread_local SkipScope::State current;

// Returns this thread's stash outside of pipelines. A tensor that is never popped stays there.
std::unordered_map<std::string, at::Tensor>& kept() {
  thread_local auto* map = new std::unordered_map<std::string, at::Tensor>();
  return *map;
}

SkipSlot* find(std::vector<SkipSlot>& slots, const std::string& name) {
  for (SkipSlot& slot : slots)
    if (slot.name == name) return &slot;
  return nullptr;
}

StageSkips& skips_of_stage(const std::string& what) {
  if (current.skips == nullptr) {
    refuse_pipeline("got " + what + " in a backward, expected it in a forward",
                    "Checkpoint no layer that stashes or pops.");
  }
  return *current.skips;
}

[[noreturn]] void refuse_undeclared(const std::string& what) {
  refuse_pipeline("got " + what + ", which is not declared of this stage",
                  "Declare which layer stashes a name, and which one pops it.");
}

void take_turn(bool& is_done, const std::string& what) {
  if (std::exchange(is_done, true))
    refuse_pipeline("got " + what + " twice in a micro-batch", "Do it once.");
}

}  // namespace

void stash(const std::string& name, at::Tensor tensor) {
  if (!current.is_in_pipeline) {
    kept()[name] = std::move(tensor);
    return;
  }
  const std::string what = "a stash of '" + name + "'";
  StageSkips& skips = skips_of_stage(what);
  SkipSlot* slot = find(skips.outgoing, name);
  if (slot == nullptr) slot = find(skips.inner, name);
  if (slot == nullptr) refuse_undeclared(what);
  take_turn(slot->is_stashed, what);
  slot->tensor = std::move(tensor);
}

at::Tensor pop(const std::string& name) {
  const std::string what = "a pop of '" + name + "'";
  if (!current.is_in_pipeline) {
    const auto found = kept().find(name);
    if (found == kept().end())
      refuse_pipeline("got " + what + ", which nothing has stashed", "Stash it before.");
    at::Tensor tensor = std::move(found->second);
    kept().erase(found);
    return tensor;
  }
  StageSkips& skips = skips_of_stage(what);
  SkipSlot* slot = find(skips.incoming, name);
  if (slot == nullptr) slot = find(skips.inner, name);
  if (slot == nullptr) refuse_undeclared(what);
  if (!slot->is_stashed)
    refuse_pipeline("got " + what + " before it was stashed", "Stash it in an earlier layer.");
  take_turn(slot->is_popped, what);
  return std::exchange(slot->tensor, at::Tensor());
}

void StageSkips::begin(std::vector<at::Tensor> tensors) {
  TORCH_INTERNAL_ASSERT(tensors.size() == incoming.size());
  for (std::vector<SkipSlot>* slots : {&incoming, &outgoing, &inner})
    for (SkipSlot& slot : *slots) slot = {.name = std::move(slot.name)};
  for (size_t i = 0; i < tensors.size(); ++i) {
    incoming[i].tensor = std::move(tensors[i]);
    incoming[i].is_stashed = true;
  }
}

void StageSkips::check_done() const {
  for (const std::vector<SkipSlot>* slots : {&incoming, &outgoing, &inner}) {
    for (const SkipSlot& slot : *slots) {
      const bool is_popped = slot.is_popped || slots == &outgoing;
      if (slot.is_stashed && is_popped) continue;
      const char* verb = slot.is_stashed ? "pop" : "stash";
      refuse_pipeline(std::string("got no ") + verb + " of '" + slot.name +
                          "' in the forward of a stage that declares it",
                      "Let it do so for every micro-batch.");
    }
  }
}

std::vector<at::Tensor> StageSkips::take_outgoing() {
  std::vector<at::Tensor> tensors;
  for (SkipSlot& slot : outgoing) tensors.push_back(std::exchange(slot.tensor, at::Tensor()));
  return tensors;
}

SkipScope::SkipScope(StageSkips* skips) : before_(std::exchange(current, State{true, skips})) {}

SkipScope::~SkipScope() { current = before_; }

}  // namespace trireme
