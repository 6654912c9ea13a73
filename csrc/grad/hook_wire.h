#pragma once

#include <trireme/grad/wire.h>

#include <memory>

namespace trireme {

class CommHook;

// Passes each bucket to a communication hook, which reduces it in its own way, and divides. On CPU
// one hook runs at a time: it may chain collectives in callbacks, which the engine's threads run,
// and so all ranks issue them in one order.
class TRIREME_API HookWire final : public Wire {
 public:
  // `parameters` are all of the module; buckets' plans index them. They must outlive the wire.
  HookWire(std::shared_ptr<Communicator> ranks, std::shared_ptr<CommHook> hook,
           const std::vector<at::Tensor>& parameters);

  void begin(const WireStep& step) override { buckets_ = &step.buckets; }
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const WireBucket& request) override;

 private:
  std::shared_ptr<CommHook> hook_;
  const std::vector<at::Tensor>& parameters_;
  Buckets* buckets_ = nullptr;
};

}  // namespace trireme
