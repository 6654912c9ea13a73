#pragma once

#include <trireme/grad/whole_delivery.h>
#include <trireme/strategies/horovod/pass_counts.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace trireme::horovod {

// The delivery of a DistributedOptimizer: every rank keeps all of the average, or of the sum, as
// .grad. It counts how often parameters get gradients, since that decides which backward
// synchronizes, and refuses one gradient too many before it is accumulated.
class TRIREME_API PassDelivery final : public WholeDelivery {
 public:
  struct Options {
    int64_t passes_per_step = 1;
    double factor = 1;  // sums are multiplied by it
    bool adds_up =
        false;  // gradients become sums, of which a second reduction makes something else
    bool sparse_as_dense = false;
    std::vector<bool> sparse;  // values per parameter: become sparse again, if they travel as dense
    Refuse refuse;
    RankOf where;
  };
  PassDelivery(const std::shared_ptr<BackwardTrigger>& trigger, Options options)
      : WholeDelivery(trigger),
        options_(std::move(options)),
        passes_(options_.passes_per_step, options_.where) {}

  // The caller holds the trigger's lock for these.

  PassCounts& passes() { return passes_; }
  // Returns whether the backward that runs synchronizes: a parameter had its last gradient.
  bool is_due() const { return is_due_; }
  // Returns whether something was reduced since the last forget().
  bool has_reduced() const { return has_reduced_; }
  // Returns whether a gradient came that was not reduced.
  bool lacks_reduction() const;
  // Begins a step: there were no passes yet.
  void forget();

  void begin(BucketLayout& layout) override;
  void coming(size_t parameter) override;
  void accumulated(size_t parameter) override { check_layout(parameter); }
  // A gradient that came while the parameter had no hook counts.
  bool has_unseen(size_t parameter) const override {
    return this->parameter(parameter).grad().defined();
  }
  void begin_step(const Step& step) override;
  void came(size_t parameter) override;
  void deliver(Bucket& bucket, size_t slot) override;
  void after_backward() override;
  void abandon(const std::vector<bool>& is_delivered) override;

 private:
  void check_layout(size_t parameter);

  Options options_;
  PassCounts passes_;
  bool is_due_ = false;
  bool has_reduced_ = false;
  // values per parameter
  std::vector<bool> is_reduced_;
  std::vector<bool> lacks_reduction_;
};

}  // namespace trireme::horovod
