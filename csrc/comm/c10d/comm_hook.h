#pragma once

#include <trireme/comm/communicator.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// One bucket as a communication hook sees it, to build a c10d::GradBucket. `buffer` is 1-D (or a
// sparse gradient), neither divided nor padded; parameter i owns lengths[i] elements from
// offsets[i].
struct HookBucket {
  size_t index = 0;
  size_t bucket_count = 0;
  at::Tensor buffer;
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
};

// Replaces the all-reduce of a bucket, division included. Collective by its nature: called on all
// ranks for the same buckets in the same order, on the thread that runs backward, without the GIL.
class TRIREME_API CommHook {
 public:
  virtual ~CommHook() = default;

  // Starts moving the bucket; Pending::result() then holds one tensor shaped like bucket.buffer.
  // `label` is for messages.
  virtual Pending run(HookBucket bucket, const std::string& label) = 0;
};

// Runs any hook of c10d's own shape, e.g. a c10d::CppCommHookInterface<State> written for torch's
// DDP. Failures are announced to `group`, and looked for there.
TRIREME_API std::shared_ptr<CommHook> make_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                                                     std::shared_ptr<Communicator> group);

}  // namespace trireme
