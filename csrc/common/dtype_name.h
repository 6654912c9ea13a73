#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace trireme {

// Returns "float32" for torch.float32, for messages. (Printed by itself a ScalarType is "Float", a
// word that users of Python never meet.)
inline std::string dtype_name(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace trireme
