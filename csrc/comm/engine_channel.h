#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>

#include <memory>

namespace trireme {

// Make one end of a channel of messages that a communicator's engine carries. `pair` has these two
// ranks only: the first sends, and nothing else goes through it. A message is a head of fixed size,
// the rest of a longer one, and the tensors in one piece.
std::unique_ptr<TensorSender> make_engine_sender(ChannelRequest request,
                                                 std::shared_ptr<Communicator> pair);
std::unique_ptr<TensorReceiver> make_engine_receiver(ChannelRequest request,
                                                     std::shared_ptr<Communicator> pair);

}  // namespace trireme
