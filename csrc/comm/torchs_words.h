#pragma once

#include <trireme/shm/fault.h>

#include <c10/util/Exception.h>

namespace trireme {

// Calls `call`; what goes wrong in shm/ comes out as torch's users expect it.
template <typename Call>
auto in_torchs_words(Call&& call) {
  try {
    return call();
  } catch (const shm::Fault& fault) {
    C10_THROW_ERROR(DistBackendError, fault.what());
  }
}

}  // namespace trireme
