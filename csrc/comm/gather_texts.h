#pragma once

#include <trireme/comm/communicator.h>

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Returns the text of every rank, by rank. Collective: two small gathers over `device`, one if all
// texts are empty.
TRIREME_API std::vector<std::string> gather_texts(const std::string& own,
                                                  Communicator& communicator, c10::Device device);

// Returns nothing where the texts of all ranks are equal, else each rank's; and whether any rank
// has set `flag`. Collective: one gather of a number in the first case, over the communicator's
// device.
TRIREME_API std::pair<std::optional<std::vector<std::string>>, bool> differing_texts(
    const std::string& own, Communicator& communicator, bool flag);

}  // namespace trireme
