#pragma once

#include <trireme/comm/communicator.h>

#include <c10/core/Device.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace trireme {

// The first rank that could not do its part.
struct RankFailure {
  int64_t rank = 0;
  std::string text = {};  // text of its exception
  bool is_value_error = false;
  std::exception_ptr own = {};  // the exception of this rank, if it has one
};

// Runs `work` on every rank, and tells all ranks whether it threw on any, for work that must
// succeed on all. The caller decides what follows (give up, throw `own` or an error that names the
// rank). Collective: one gather_texts() over `device`.
TRIREME_API std::optional<RankFailure> run_together(const std::function<void()>& work,
                                                    Communicator& communicator, c10::Device device);

}  // namespace trireme
