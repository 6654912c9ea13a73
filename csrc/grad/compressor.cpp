#include <trireme/grad/compressor.h>

#include <trireme/comm/c10d/comm_hook.h>

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

class ScatterCompressor final : public Compressor {
 public:
  explicit ScatterCompressor(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  bool is_plain_sum() const override { return true; }

  Pending reduce(const CompressorRequest& request) override {
    return communicator_->reduce_scatter({request.bucket.sums()}, {request.bucket.wire()},
                                         ReduceOp::kSum, request.label);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
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

std::unique_ptr<Compressor> make_scatter_compressor(std::shared_ptr<Communicator> communicator) {
  return std::make_unique<ScatterCompressor>(std::move(communicator));
}

std::unique_ptr<Compressor> make_hook_compressor(std::shared_ptr<CommHook> hook) {
  return std::make_unique<HookCompressor>(std::move(hook));
}

}  // namespace trireme
