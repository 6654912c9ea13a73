#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/export.h>

#include <memory>
#include <vector>

namespace trireme {

// Makes channels: through the memory of the host if both ranks share it, else as messages of the
// communicator's engine, over a group of its own for each, which lives as long as the communicator.
// Collective; all ranks request the same. The communicator outlives them. On all ranks alike throws
// ValueError for invalid requests, or requests that differ between ranks, and
// c10::DistBackendError.
TRIREME_API std::unique_ptr<TensorChannels> make_channels(Communicator& communicator,
                                                          std::vector<ChannelRequest> requests);

}  // namespace trireme
