#pragma once

#include <trireme/grad/transport.h>

#include <memory>

namespace trireme {

class CommHook;

// Passes each bucket to a communication hook, which reduces it in its own way, and divides. On CPU
// one hook runs at a time: it may chain collectives in callbacks, which the engine's threads run,
// and so all ranks issue them in one order.
class TRIREME_API HookTransport final : public Transport {
 public:
  // `parameters` are all of the module; buckets' plans index them. They must outlive the transport.
  HookTransport(std::shared_ptr<Communicator> ranks, std::shared_ptr<CommHook> hook,
                const std::vector<at::Tensor>& parameters);

  void begin(const TransportStep& step) override { buckets_ = &step.buckets; }
  void accumulated(size_t bucket, size_t slot) override;
  Pending launch(const TransportBucket& request) override;

 private:
  std::shared_ptr<CommHook> hook_;
  const std::vector<at::Tensor>& parameters_;
  Buckets* buckets_ = nullptr;
};

}  // namespace trireme
