#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/outer_all_reduce.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Averages of tensors over a group, in flight until finish().
class TRIREME_API ListAverage {
 public:
  virtual ~ListAverage() = default;

  // What errors call the collectives.
  struct Labels {
    std::string found = {};  // of the numbers of ranks that have values
    std::string sums = {};
  };

  // Begins to average `values`, one for each of `like`, which has its sizes and dtype and is the
  // same on all ranks. An undefined value counts as zeros, unless it is undefined on all ranks:
  // then there is no average. Collective. Throws c10::DistBackendError.
  virtual void begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
                     const Labels& labels) = 0;
  // Waits for the averages that were begun, and calls `place` with each in their order. An average
  // lies in the memory of its value, if that is dense and contiguous.
  using Place = std::function<void(const at::Tensor& like, at::Tensor average)>;
  virtual void finish(const Place& place) = 0;
  // Forgets them.
  virtual void abandon() = 0;
};

// Averages in place where tensors are dense and contiguous. Sparse tensors stay sparse where all
// ranks have such. One thread at a time.
//
// Cost: an all-reduce of two numbers per tensor, which is waited for, one of all dense tensors, and
// one of each sparse tensor, which are not. Memory: what is not contiguous, once more.
class TRIREME_API GroupAverage final : public ListAverage {
 public:
  // `sum` sums over the ranks of `group`.
  GroupAverage(std::shared_ptr<Communicator> group, std::unique_ptr<OuterAllReduce> sum);

  void begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
             const Labels& labels) override;
  void finish(const Place& place) override;
  void abandon() override { in_flight_.clear(); }

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

// The numbers of ranks that have a value of each tensor, and of those that have a sparse one.
struct ValueCounts {
  std::vector<int64_t> any;
  std::vector<int64_t> sparse;
};
// Collective: an all-reduce of two numbers per tensor, which is waited for.
TRIREME_API ValueCounts count_values(Communicator& group, const std::vector<at::Tensor>& values,
                                     const std::string& label);

}  // namespace trireme
