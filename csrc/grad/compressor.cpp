#include <trireme/grad/compressor.h>

#include <trireme/comm/comm_hook.h>

#include <utility>

namespace trireme {
namespace {

class IdentityCompressor final : public Compressor {
 public:
  explicit IdentityCompressor(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  bool is_plain_sum() const override { return true; }

  Pending reduce(const CompressorRequest& request) override {
    return communicator_->all_reduce({request.bucket.wire()}, ReduceOp::kSum, request.label);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
};

// The all_reduce begins when the caller waits: buckets are waited for in one order on all ranks.
class ScatteredThenReduced final : public Pending::State {
 public:
  ScatteredThenReduced(Pending scattered, at::Tensor sums,
                       std::shared_ptr<Communicator> communicator, std::string label)
      : scattered_(std::move(scattered)),
        sums_(std::move(sums)),
        communicator_(std::move(communicator)),
        label_(std::move(label)) {}

  bool done() const override { return scattered_.done(); }
  void wait() override {
    scattered_.wait();
    communicator_->all_reduce({sums_}, ReduceOp::kSum, label_).wait();
  }
  std::optional<Pending::Clock::time_point> finished_at() const override {
    return scattered_.finished_at();
  }

 private:
  Pending scattered_;
  at::Tensor sums_;
  std::shared_ptr<Communicator> communicator_;
  std::string label_;
};

class ScatterCompressor final : public Compressor {
 public:
  ScatterCompressor(std::shared_ptr<Communicator> communicator,
                    std::shared_ptr<Communicator> replicates_with)
      : communicator_(std::move(communicator)), replicates_with_(std::move(replicates_with)) {}

  bool is_plain_sum() const override { return true; }

  Pending reduce(const CompressorRequest& request) override {
    const at::Tensor& sums = request.bucket.sums();
    Pending scattered = communicator_->reduce_scatter({sums}, {request.bucket.wire()},
                                                      ReduceOp::kSum, request.label);
    if (!replicates_with_) return scattered;
    return Pending(std::make_unique<ScatteredThenReduced>(std::move(scattered), sums,
                                                          replicates_with_, request.label));
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Communicator> replicates_with_;
};

class HookCompressor final : public Compressor {
 public:
  explicit HookCompressor(std::shared_ptr<CommHook> hook) : hook_(std::move(hook)) {}

  bool is_plain_sum() const override { return false; }

  Pending reduce(const CompressorRequest& request) override {
    HookBucket bucket;
    bucket.index = request.index;
    bucket.bucket_count = request.bucket_count;
    bucket.buffer = request.bucket.payload();
    const std::vector<BucketSlot>& slots = request.bucket.plan().slots;
    for (size_t i = 0; i < slots.size(); ++i) {
      bucket.offsets.push_back(static_cast<size_t>(slots[i].offset));
      bucket.lengths.push_back(static_cast<size_t>(slots[i].numel));
      bucket.sizes.emplace_back(request.bucket.slot_sizes(i));
      bucket.parameters.push_back(request.parameters[static_cast<size_t>(slots[i].parameter)]);
    }
    return hook_->run(std::move(bucket), request.label);
  }

 private:
  std::shared_ptr<CommHook> hook_;
};

}  // namespace

std::unique_ptr<Compressor> make_identity_compressor(std::shared_ptr<Communicator> communicator) {
  return std::make_unique<IdentityCompressor>(std::move(communicator));
}

std::unique_ptr<Compressor> make_scatter_compressor(std::shared_ptr<Communicator> communicator,
                                                    std::shared_ptr<Communicator> replicates_with) {
  return std::make_unique<ScatterCompressor>(std::move(communicator), std::move(replicates_with));
}

std::unique_ptr<Compressor> make_hook_compressor(std::shared_ptr<CommHook> hook) {
  return std::make_unique<HookCompressor>(std::move(hook));
}

}  // namespace trireme
