#pragma once

#include <trireme/shm/fault.h>

#include <c10/util/Exception.h>

namespace trireme {

// Calls `call`; a fault of shm/ becomes c10d's exception, after note(fault) has seen it.
template <typename Call, typename Note>
auto translate_faults(Call&& call, const Note& note) {
  try {
    return call();
  } catch (const shm::Fault& fault) {
    note(fault);
    C10_THROW_ERROR(DistBackendError, fault.what());
  }
}

template <typename Call>
auto translate_faults(Call&& call) {
  return translate_faults(call, [](const shm::Fault& /*nobody's*/) {});
}

}  // namespace trireme
