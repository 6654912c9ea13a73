#include <trireme/strategies/remote/endpoint.h>

namespace trireme::remote {

PendingCallPtr Caller::begin(int64_t to, Verb verb, std::string name, const RefPtr& ref,
                             Values args) const {
  CallRequest request{to};
  request.timeout = timeout_;
  request.message.verb = verb;
  request.message.name = std::move(name);
  request.message.args = std::move(args);
  if (ref) request.call_object(ref);
  return agent_->begin(std::move(request));
}

Endpoint::Endpoint(const Context& ctx, const std::string& name, const EndpointOptions& options)
    : Endpoint(ctx.communicator(), name, options) {}

Endpoint::Endpoint(const std::shared_ptr<Communicator>& communicator, const std::string& name,
                   const EndpointOptions& options)
    : Caller(RpcAgent::start(communicator, name, options.threads), std::nullopt) {}

Endpoint::~Endpoint() { agent()->abandon("its endpoint was dropped without stop()"); }

void Endpoint::stop() { agent()->stop(); }

}  // namespace trireme::remote
