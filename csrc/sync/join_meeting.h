#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// A call that a rank with inputs is about to make together with the others. It is the same on all
// of them but for `flags`, which are combined for all.
struct JoinCall {
  int64_t what = 1;  // a number of the joinable's own
  int64_t flags = 0;
  std::array<double, 4> numbers = {};
  int64_t joinable = 0;  // its place in the join

  bool is_like(const JoinCall& other) const {
    return what == other.what && joinable == other.joinable && numbers == other.numbers;
  }
};

// The meetings of all ranks in which those with inputs name their next call, and the data that a
// rank without inputs lacks to follow it. See [Note: ranks with different numbers of inputs] in
// join.h. Python's hooks for torch's Join stand on this, too.
class TRIREME_API JoinMeeting {
 public:
  explicit JoinMeeting(std::shared_ptr<Communicator> communicator);

  // Tells this rank's call, or that it has run out. Collective: one small all-reduce.
  void meet(const std::optional<JoinCall>& own);

  // Tell of the last meeting; before the first one, all ranks have inputs.
  const std::vector<std::optional<JoinCall>>& calls() const { return calls_; }  // by rank
  JoinCall call() const;                      // the root's, with the flags of all
  int64_t active() const { return active_; }  // how many have inputs
  int64_t root() const { return root_; }  // the lowest rank with inputs; if none, the last such one
  bool any_has_run_out() const { return active_ < communicator_->world(); }
  bool has_run_out() const;  // this rank

  // Returns the text of the root. Collective: two small gathers.
  std::string text_of_root(const std::string& own);
  // Gives the root's gradients of `parameters` to the ranks that have run out; to those without
  // one, or with one that is not dense, none. Collective: a small broadcast, and one of gradients.
  void share_gradients(const std::vector<at::Tensor>& parameters);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  std::vector<uint8_t> kinds_of_gradients(const std::vector<at::Tensor>& parameters);

  std::shared_ptr<Communicator> communicator_;
  std::vector<std::optional<JoinCall>> calls_;
  int64_t active_;
  int64_t root_ = 0;
};

}  // namespace trireme
