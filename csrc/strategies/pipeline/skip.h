#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// A tensor that a stage stashes under a name, and that a later stage, or the same one, pops. A name
// is stashed once and popped once in each micro-batch.
struct PipelineSkip {
  std::string name = {};
  int64_t from = 0;
  int64_t to = 0;
};

// Hand a tensor past the layers in between: from a forward to a later one. In a stage of a pipeline
// the name is one that the pipeline was told of, and the tensor, which may be undefined, goes
// straight to the stage that pops it. Elsewhere it is kept on this thread until it is popped, or
// another one is stashed under its name. Throw ValueError for a name that is not to be stashed or
// popped here, or not now.
TRIREME_API void stash(const std::string& name, at::Tensor tensor);
TRIREME_API at::Tensor pop(const std::string& name);

// The slots of stash() and pop(), one per name of a stage, while the forward of a micro-batch runs.
struct SkipSlot {
  std::string name;
  at::Tensor tensor = {};  // between stash and pop
  bool is_stashed = false;
  bool is_popped = false;
};
struct StageSkips {
  std::vector<SkipSlot> incoming = {};  // popped here, stashed in another stage
  std::vector<SkipSlot> outgoing = {};  // stashed here, popped in another stage
  std::vector<SkipSlot> inner = {};     // both here

  // Begins a micro-batch with the tensors that came for the incoming.
  void begin(std::vector<at::Tensor> tensors);
  // Throws ValueError where a forward did not stash or pop what it was to.
  void check_done() const;
  // Returns what was stashed for other stages.
  std::vector<at::Tensor> take_outgoing();
};

// Directs stash() and pop() of this thread to a stage while it lives. Null makes both throw, while
// a backward runs.
class SkipScope {
 public:
  explicit SkipScope(StageSkips* skips);
  ~SkipScope();
  SkipScope(const SkipScope&) = delete;
  SkipScope& operator=(const SkipScope&) = delete;

  struct State {
    bool is_in_pipeline = false;
    StageSkips* skips = nullptr;
  };

 private:
  State before_;
};

}  // namespace trireme
