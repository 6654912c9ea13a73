#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/outer_all_reduce.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Averages of tensors over a group, in place where they are dense and contiguous, and in flight
// until finish(). Sparse tensors stay sparse where all ranks have such. One thread at a time.
//
// Cost: an all-reduce of two numbers per tensor, which is waited for, one of all dense tensors, and
// one of each sparse tensor, which are not. Memory: what is not contiguous, once more.
class TRIREME_API GroupAverage {
 public:
  // `sum` sums over the ranks of `group`.
  GroupAverage(std::shared_ptr<Communicator> group, std::unique_ptr<OuterAllReduce> sum);

  // What errors call the collectives.
  struct Labels {
    std::string found = {};  // of the numbers of ranks that have values
    std::string sums = {};
  };

  // Begins to average `values`, one for each of `like`, which has its sizes and dtype and is the
  // same on all ranks. An undefined value counts as zeros, unless it is undefined on all ranks:
  // then there is no average. Collective. Throws c10::DistBackendError.
  void begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
             const Labels& labels);
  // Waits for the averages that were begun, and calls `place` with each in their order. An average
  // lies in the memory of its value, if that is dense and contiguous.
  using Place = std::function<void(const at::Tensor& like, at::Tensor average)>;
  void finish(const Place& place);
  // Forgets them.
  void abandon() { in_flight_.clear(); }

 private:
  // The tensors that one collective sums.
  struct Reduction {
    std::vector<at::Tensor> like = {};
    std::vector<at::Tensor> sums = {};
    Pending pending = {};
  };

  void launch(Reduction reduction, const std::string& label);

  std::shared_ptr<Communicator> group_;
  std::unique_ptr<OuterAllReduce> sum_;
  std::vector<Reduction> in_flight_;
};

}  // namespace trireme
