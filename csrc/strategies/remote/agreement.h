#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/strategies/remote/definitions.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::remote {

struct StartRequest {
  std::string name = {};
  int64_t threads = 0;
};

// The data that all ranks know of each other, by rank.
struct Agreement {
  std::vector<std::string> names = {};
  std::vector<int64_t> sessions = {};  // random numbers that tell starts apart
  std::vector<std::vector<DefinitionText>> definitions = {};
};

// Exchanges the ranks' start requests and definitions. Collective. Throws c10::ValueError on all
// ranks alike for names that are equal, empty or cannot be printed, for fewer than one thread, and
// for definitions that differ or are doubled.
Agreement agree_on_start(Communicator& communicator, const StartRequest& request);

}  // namespace trireme::remote
