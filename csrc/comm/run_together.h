#pragma once

#include <trireme/comm/communicator.h>

#include <c10/core/Device.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace trireme {

// Names the first rank that could not do its part.
struct RankFailure {
  int64_t rank = 0;
  std::string text = {};  // what its exception says
  bool is_value_error = false;
  std::exception_ptr own = {};  // the exception of this rank, if it has one
};

// Does what no rank may do unless all can: runs `work`, and tells every rank whether it threw
// anywhere. What follows then (give up, throw `own` or an error that names the rank) is the
// caller's. Collective: one gather_texts() over `device`.
TRIREME_API std::optional<RankFailure> run_together(const std::function<void()>& work,
                                                    Communicator& communicator, c10::Device device);

}  // namespace trireme
