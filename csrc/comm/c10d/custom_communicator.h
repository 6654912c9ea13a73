#pragma once

#include <trireme/comm/c10d/c10d_wait.h>
#include <trireme/comm/forwarding_communicator.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A user's own collective, on flat tensors.
struct CustomCollective {
  // Returns `numel` contiguous elements for the collective; may return the same ones in every call.
  std::function<at::Tensor(int64_t numel, at::ScalarType dtype, c10::Device device)> allocate = {};
  // Starts the collective. Returns null if it is over already, or in order with the caller's
  // current stream.
  std::function<std::shared_ptr<c10d::Work>(at::Tensor output, at::Tensor input)> start = {};

  explicit operator bool() const { return start != nullptr; }
};

// A communicator whose all_gather, or reduce_scatter, goes through a user's own collective, as soon
// as one is set; all else is that of `inner`, whose health it shares.
//
// For a list of tensors the user's collective is called once, on their concatenation: all_gather
// with its input in its place in the output (as bytes if dtypes differ), reduce_scatter, of one
// tensor, with the sum as its operation. Costs a copy of inputs and outputs each, into and out of
// the memory that allocate() returns.
//
// Throws ValueError for memory that does not fit; the errors of the user's functions; for a Work
// that fails, the errors of a verb.
class TRIREME_API CustomCommunicator final : public ForwardingCommunicator {
 public:
  explicit CustomCommunicator(std::shared_ptr<Communicator> inner);

  // Sets a user's collective; an empty one brings back inner's own. Not called while one is on its
  // way.
  void set_all_gather(CustomCollective collective) { all_gather_ = std::move(collective); }
  void set_reduce_scatter(CustomCollective collective);
  // Returns whether a reduce_scatter of CPU tensors may return only when all ranks have come: the
  // user's last one did, or there was none yet.
  bool scatter_waits() const override { return reduce_scatter_ && scatter_waits_; }

  Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::string label) override;
  Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                         ReduceOp op, std::string label) override;
  std::shared_ptr<GroupHealth> health() const override { return health_; }

 private:
  class Flat;
  std::string begin(const char* verb, const std::string& label);
  at::Tensor allocate(const CustomCollective& collective, int64_t numel, const at::Tensor& like,
                      at::ScalarType dtype) const;

  std::shared_ptr<GroupHealth> health_;
  CustomCollective all_gather_;
  CustomCollective reduce_scatter_;
  bool scatter_waits_ = true;
};

// Returns the communicator without the user's collectives, for the library's own transfers.
TRIREME_API std::shared_ptr<Communicator> plain_of(std::shared_ptr<Communicator> communicator);

}  // namespace trireme
