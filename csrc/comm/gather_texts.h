#pragma once

#include <trireme/comm/communicator.h>

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace trireme {

// Returns the text of every rank, by rank. Collective: two small gathers over `device`, one if all
// texts are empty.
TRIREME_API std::vector<std::string> gather_texts(const std::string& own,
                                                  Communicator& communicator, c10::Device device);

// Returns the text of rank `root`; the other ranks' texts count for nothing. Collective: two
// broadcasts over `device`, one of an empty text.
TRIREME_API std::string broadcast_text(const std::string& own, int64_t root,
                                       Communicator& communicator, c10::Device device);

}  // namespace trireme
