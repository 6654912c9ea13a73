#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <cstdint>
#include <memory>
#include <string>

namespace trireme::remote {

// A call of another rank, or of this one, on its way to its answer.
struct ServedCall {
  int64_t from = 0;
  int64_t number = 0;
  shm::Clock::time_point deadline = {};      // the caller waits no longer
  std::string what = {};                     // "method act of Observer"
  std::shared_ptr<Hosted> object = nullptr;  // set for a method
  CallMessage call = {};
};

}  // namespace trireme::remote
